//go:build linux

package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net/netip"
	"os"
	"slices"
	"sync/atomic"
	"syscall"
	"time"

	v1 "k8s.io/api/core/v1"

	"github.com/go-proxier/proxier/internal/stall"
	"github.com/go-proxier/proxier/ruleset"
)

// options holds the values of the flags.
type options struct {
	length              time.Duration
	services, endpoints int
	mode, iptables      string
	seed                uint64
	rate, workers       int
	held, talks         int
	pause, repair       time.Duration
	// drain is the longest time that the end waits for grace periods and timeouts.
	drain        time.Duration
	nodeproxy    string
	apiserver    string
	logFile, out string
	only         string
	events       []event
}

// soak is one run.
type soak struct {
	o         *options
	rec       *recorder
	net       *network
	oracle    *oracle
	pop       *population
	src       source
	agent     *agent
	stalls    *stall.Detector
	traffic   *traffic
	catalogue *catalogue
	// rng chooses objects and events. samples chooses the connections to judge, whose
	// number depends on time.
	rng, samples *rand.Rand
	barriers     int // counts the barriers
	// dropped holds the counters at the begin of the last event.
	dropped  atomic.Pointer[drops]
	deadline time.Time
}

// run makes a whole run. It returns an error if the run could not continue; losses are in
// the report.
func run(ctx context.Context, o *options, dir string, log, out io.Writer) (*Report, error) {
	s := &soak{
		o: o, rec: newRecorder(log), stalls: stall.Start(), catalogue: &catalogue{of: map[int][]target{}},
		rng: rand.New(rand.NewPCG(o.seed, 0)), samples: rand.New(rand.NewPCG(o.seed, 1)),
	}
	defer s.stalls.Stop()
	s.pop = newPopulation(s.rng, o.endpoints)
	var err error
	if s.net, err = newNetwork(); err != nil {
		return nil, err
	}
	defer s.net.close()
	if s.oracle, err = newOracle(); err != nil {
		return nil, err
	}
	if o.apiserver != "" {
		fmt.Fprintln(out, "Starting an API server.")
		s.src, err = newAPIServer(ctx, s.net.control, o.apiserver, dir)
	} else {
		s.src, err = newFolder(dir)
	}
	if err != nil {
		return nil, err
	}
	defer s.src.close()
	if s.agent, err = newAgent(o, s.net.node, s.src, dir, func(err error) { s.rec.failf("%v", err) }); err != nil {
		return nil, err
	}
	defer s.agent.close()
	r := &s.rec.r
	r.Mode, r.Services, r.Endpoints, r.Seed, r.Source = o.mode, o.services, o.endpoints, o.seed, "a folder"
	if o.apiserver != "" {
		r.Source = "an API server"
	}

	stop := s.follow(ctx, out)
	err = s.life(ctx, out)
	stop()
	if s.traffic != nil {
		s.traffic.stop()
		s.traffic.wg.Wait()
	}
	s.rec.limitExcuses()
	s.rec.mu.Lock()
	defer s.rec.mu.Unlock()
	r.Seconds = time.Since(r.Begun).Seconds()
	stalls, total := s.stalls.Stalls()
	r.Stalls, r.StallSeconds = stalls, total.Seconds()
	return r, err
}

// follow writes a line of progress every ten seconds until the function that it returns
// is called.
func (s *soak) follow(ctx context.Context, out io.Writer) (stop func()) {
	ctx, cancel := context.WithCancel(ctx)
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		for {
			select {
			case <-ctx.Done():
				return
			case <-time.After(10 * time.Second):
				line := s.rec.progress()
				fmt.Fprintln(out, line)
				s.rec.logf("%s", line)
			}
		}
	}()
	return func() {
		cancel()
		<-ended
	}
}

// The times at which the agent's usage is measured.
const (
	whenEmpty     = "without Services"
	whenCold      = "after a cold start"
	whenEnd       = "at the end"
	whenEndsEmpty = "without Services again"
)

var usageTimes = []string{whenEmpty, whenCold, whenEnd, whenEndsEmpty}

// life runs the soak from an empty node to an empty node.
func (s *soak) life(ctx context.Context, out io.Writer) error {
	pristine, err := s.dump(ctx)
	if err != nil {
		return err
	}
	fmt.Fprintln(out, "Starting the agent without Services.")
	if err := s.agent.start(); err != nil {
		return err
	}
	if err := s.barrierReset(ctx); err != nil {
		return err
	}
	s.drained(ctx)
	empty, err := s.measure(ctx, whenEmpty)
	if err != nil {
		return err
	}
	s.agent.stop(syscall.SIGTERM)

	fmt.Fprintf(out, "Creating %d Services.\n", s.o.services)
	var all []*service
	for range s.o.services {
		all = append(all, s.pop.create())
	}
	if err := s.set(ctx, all...); err != nil {
		return err
	}
	s.pop.keepFirst()
	fmt.Fprintln(out, "Starting the agent.")
	s.rec.begin("cold start", fmt.Sprintf("%d Services", s.o.services))
	begun := time.Now()
	if err := s.agent.start(); err != nil {
		return err
	}
	if err := s.barrier(ctx); err != nil {
		return err
	}
	s.rec.end("cold start", time.Since(begun))
	if err := s.barrierReset(ctx); err != nil {
		return err
	}
	s.drained(ctx)
	cold, err := s.measure(ctx, whenCold)
	if err != nil {
		return err
	}

	empty.room = int(roomShare * float64(cold.usage.HeapBytes))
	fmt.Fprintln(out, "Events begin.")
	s.traffic = s.startTraffic(ctx)
	if err := s.judge(ctx, judgedAtEnds); err != nil {
		return err
	}
	s.deadline = time.Now().Add(s.o.length)
	if err := s.events(ctx); err != nil {
		return err
	}

	fmt.Fprintln(out, "Restoring the Services of the beginning.")
	s.rec.begin("end", "the Services of the beginning are restored")
	if err := s.restore(ctx); err != nil {
		return err
	}
	if err := s.barrierReset(ctx); err != nil {
		return err
	}
	if err := s.judge(ctx, judgedAtEnds); err != nil {
		return err
	}
	s.traffic.end()
	if err := s.same(ctx, whenEnd, cold); err != nil {
		return err
	}

	fmt.Fprintln(out, "Deleting all Services.")
	var gone []change
	for id, old := range s.pop.now {
		if id != barrierID {
			gone = append(gone, change{old, nil})
		}
	}
	if err := s.commit(ctx, gone...); err != nil {
		return err
	}
	if err := s.barrierReset(ctx); err != nil {
		return err
	}
	if err := s.same(ctx, whenEndsEmpty, empty); err != nil {
		return err
	}
	s.agent.stop(syscall.SIGTERM)
	if err := s.agent.cleanup(); err != nil {
		s.rec.failf("run --cleanup: %v", err)
	}
	if err := s.pristine(ctx, pristine); err != nil {
		return err
	}
	files, err := os.ReadDir(s.agent.dir)
	for _, f := range files {
		s.rec.leftover("the agent left the file %s", f.Name())
	}
	return err
}

// drained waits, in mode ipvs, until the virtual servers of earlier barriers have drained.
func (s *soak) drained(ctx context.Context) {
	if s.o.mode == "ipvs" {
		sleep(ctx, s.o.drain)
	}
}

// set commits new versions of Services.
func (s *soak) set(ctx context.Context, services ...*service) error {
	var list []change
	for _, svc := range services {
		list = append(list, change{s.pop.now[svc.id], svc})
	}
	return s.commit(ctx, list...)
}

// commit writes changes of different Services, to the oracle first.
func (s *soak) commit(ctx context.Context, changes ...change) error {
	slices.SortFunc(changes, func(a, b change) int { return a.id() - b.id() })
	for _, c := range changes {
		s.oracle.commit(c.old, c.now)
	}
	s.oracle.publish()
	if err := s.src.write(ctx, changes); err != nil {
		return err
	}
	for _, c := range changes {
		s.pop.note(c.id(), c.now)
		if c.id() == barrierID {
			continue
		}
		if c.now == nil {
			s.catalogue.set(c.id(), nil)
		} else {
			s.catalogue.set(c.id(), c.now.targets())
		}
	}
	return nil
}

// barrier waits until every committed change is in effect. The changes of one sync may take
// effect one after the other, in any order, and in one family later than in the other. When the
// second ping is in effect, the sync with the first one is over.
func (s *soak) barrier(ctx context.Context) error {
	for range 2 {
		if err := s.ping(ctx); err != nil {
			return err
		}
	}
	s.oracle.inEffect()
	return nil
}

// ping changes the port and the endpoint of the barrier's Service and connects until the
// new endpoint answers at the new port, in both families. Earlier syncs are in effect by then:
// the API server sends changes of Services in order, and changes of slices in order.
func (s *soak) ping(ctx context.Context) error {
	begun := time.Now()
	s.barriers++
	b := s.pop.barrier(s.barriers)
	if err := s.set(ctx, b); err != nil {
		return err
	}
	complained := false
	for f := range families {
		want := netip.AddrPortFrom(podAddr(b.endpoints[0].pod, f), podPort)
		t := target{netip.AddrPortFrom(b.addr(clusterIPs, f), uint16(b.port)), v1.ProtocolTCP}
		for ; ; sleep(ctx, 10*time.Millisecond) {
			o := s.net.places[0].probe(ctx, t, 2*time.Second)
			if o.kind == reached && o.server == want {
				break
			}
			if ctx.Err() != nil {
				return ctx.Err()
			}
			if !complained && time.Since(begun) > s.o.repair {
				complained = true
				s.rec.failf("%s: not in effect after %v: %s", t, s.o.repair, o)
			}
			if time.Since(begun) > s.o.repair+2*time.Minute {
				return errors.New("the agent stopped applying changes")
			}
		}
	}
	return nil
}

// barrierReset is a barrier that ends with the same objects each time, some time after
// the last endpoint was removed: mode nftables keeps an entry for a removed endpoint until
// the first change after its grace period of a second.
func (s *soak) barrierReset(ctx context.Context) error {
	for _, n := range []int{1, 2, 2 + localPods} { // the last two have the same endpoint
		s.barriers = n - 1
		if err := s.ping(ctx); err != nil {
			return err
		}
		if n == 2 {
			sleep(ctx, 1500*time.Millisecond)
		}
	}
	s.oracle.inEffect()
	return nil
}

const (
	// judgedEach is the number of connections judged after an event, and judgedAtEnds
	// that at the beginning and the end.
	judgedEach, judgedAtEnds = 30, 100
)

// judge makes n connections from random places to random targets and judges each by Trace.
// Every change must be in effect.
func (s *soak) judge(ctx context.Context, n int) error {
	for _, j := range s.sample(n) {
		s.judgeOne(ctx, j, func(v *version, o outcome) bool { return s.count("judged", v, j.from, j.to, o) })
	}
	return ctx.Err()
}

// judged is one connection to judge.
type judged struct {
	from *place
	to   target
}

// sample chooses n connections. One in ten goes to a port or an address that no Service has.
func (s *soak) sample(n int) (out []judged) {
	for range n {
		j := judged{from: s.net.places[s.samples.IntN(len(s.net.places))]}
		_, t, ok := s.catalogue.pick(s.samples)
		if !ok {
			continue
		}
		switch f := familyOf(t.to.Addr()); {
		case s.o.mode == "ipvs": // it does not refuse closed ports as the other modes do
		case s.samples.IntN(20) == 0:
			t.to = netip.AddrPortFrom(t.to.Addr(), uint16(7000+s.samples.IntN(1000)))
		case s.samples.IntN(20) == 0:
			t.to = netip.AddrPortFrom(number(clusterIPs[f], 40000+s.samples.IntN(10000)), 80)
		}
		j.to = t
		out = append(out, j)
	}
	return out
}

// judgeOne makes a connection and, to a Service with affinity, another one. It reports
// whether both were right.
func (s *soak) judgeOne(ctx context.Context, j judged, right func(*version, outcome) bool) bool {
	v := s.oracle.since()
	verdict := v.Trace(j.from.packet(j.to))
	wait := connectTimeout
	if verdict.Action == ruleset.ActionDrop || verdict.Action == ruleset.ActionPass {
		wait = silenceTimeout
	}
	o := j.from.probe(ctx, j.to, wait)
	if ctx.Err() != nil || !right(v, o) {
		return false
	}
	if verdict.Action != ruleset.ActionForward || verdict.Affinity == 0 {
		return true
	}
	again := j.from.probe(ctx, j.to, wait)
	if again.kind == reached && again.server != o.server {
		again.err = fmt.Errorf("%s: %s with affinity goes to %s and then to %s", j.from.name, j.to, o.server, again.server)
		again.kind = failed
	}
	return right(v, again)
}

// repaired waits until the agent has repaired the rules: until a number of connections in
// a row are right.
func (s *soak) repaired(ctx context.Context) error {
	begun := time.Now()
	for complained := false; ; sleep(ctx, 50*time.Millisecond) {
		good := true
		var why outcome
		for _, j := range s.sample(judgedEach) {
			good = good && s.judgeOne(ctx, j, func(v *version, o outcome) bool {
				why = o
				return s.oracle.judge(v, j.from, j.to, o) == nil
			})
			if !good {
				break
			}
		}
		if good || ctx.Err() != nil {
			break
		}
		if !complained && time.Since(begun) > s.o.repair {
			complained = true
			s.rec.failf("not repaired after %v: %s", s.o.repair, why)
		}
		if time.Since(begun) > s.o.repair+2*time.Minute {
			return errors.New("the agent does not repair the rules")
		}
	}
	return s.barrier(ctx)
}

// restore restores the Services of the beginning.
func (s *soak) restore(ctx context.Context) error {
	var gone, bare, last []change
	for id, now := range s.pop.now {
		if id != barrierID && s.pop.first[id] == nil {
			gone = append(gone, change{now, nil})
		}
	}
	if err := s.commit(ctx, gone...); err != nil {
		return err
	}
	// Services exchange node ports: all release theirs first.
	for id, first := range s.pop.first {
		if now := s.pop.now[id]; now != nil && now != first && len(now.ports()) != 0 {
			b := now.clone()
			s.pop.setKind(b, clusterIP)
			bare = append(bare, change{now, b})
		}
	}
	if err := s.commit(ctx, bare...); err != nil {
		return err
	}
	for id, first := range s.pop.first {
		if now := s.pop.now[id]; now != first {
			last = append(last, change{now, first})
		}
	}
	return s.commit(ctx, last...)
}
