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
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"

	v1 "k8s.io/api/core/v1"

	"github.com/go-proxier/proxier/examples/e2e/internal/nodeagent"
	"github.com/go-proxier/proxier/internal/testing/netlab"
	"github.com/go-proxier/proxier/internal/testing/stall"
	"github.com/go-proxier/proxier/ruleset"
)

// options holds the values of the flags, and what tests change.
type options struct {
	length         time.Duration
	mode           string
	services, rate int
	seed           uint64
	repair         time.Duration
	nodeproxy      string
	logFile, only  string
	pause          time.Duration // the average pause between two events
	drain          time.Duration // the longest time that the end waits for grace periods and timeouts
	events         []event
}

// soak is one run.
type soak struct {
	o       *options
	rec     *recorder
	net     *network
	oracle  *oracle
	pop     *population
	src     *folder
	agent   nodeagent.Agent
	stalls  *stall.Detector
	traffic *traffic // nil before it starts
	// rng chooses objects and events. samples chooses the connections to judge, whose
	// number depends on time.
	rng, samples *rand.Rand
	barriers     int // counts the barriers
}

// run makes a whole run. It returns an error if the run could not continue; losses are in
// the recorder, which is nil if nothing was run.
func run(ctx context.Context, o *options, dir string, log, out io.Writer) (*recorder, error) {
	s := &soak{o: o, rec: newRecorder(log), stalls: stall.Start(), rng: rand.New(rand.NewPCG(o.seed, 0)), samples: rand.New(rand.NewPCG(o.seed, 1))}
	defer s.stalls.Stop()
	s.pop = newPopulation(s.rng, o.services)
	var err error
	if s.net, err = newNetwork(); err != nil {
		return nil, err
	}
	defer s.net.lab.Close()
	if s.oracle, err = newOracle(); err != nil {
		return nil, err
	}
	if s.src, err = newFolder(dir); err != nil {
		return nil, err
	}
	if err := s.newAgent(ctx, dir); err != nil {
		return nil, err
	}
	defer s.agent.Kill()
	progress, stop := context.WithCancel(ctx)
	var wg sync.WaitGroup
	wg.Go(func() {
		for sleep(progress, 10*time.Second); progress.Err() == nil; sleep(progress, 10*time.Second) {
			line := s.rec.progress()
			s.rec.log.Print(line)
			fmt.Fprintln(out, line)
		}
	})
	err = s.life(ctx)
	stop()
	wg.Wait()
	if s.traffic != nil {
		s.traffic.end()
	}
	s.rec.limitExcuses()
	stalls, total := s.stalls.Stalls()
	s.rec.log.Printf("the machine stalled %d times, for %.1f s in all", stalls, total.Seconds())
	return s.rec, err
}

// life runs the soak from an empty node to an empty node.
func (s *soak) life(ctx context.Context) error {
	if err := s.agent.Start(); err != nil {
		return err
	}
	if err := s.barrier(ctx); err != nil {
		return err
	}
	first, err := s.usage()
	if err != nil {
		return err
	}

	if err := s.agent.Stop(syscall.SIGTERM); err != nil {
		return err
	}
	var all []*service
	for range s.o.services {
		all = append(all, s.pop.create())
	}
	if err := s.set(ctx, all...); err != nil {
		return err
	}
	if err := s.happen(ctx, event{name: "cold start", do: func(s *soak, _ context.Context) error { return s.agent.Start() }}); err != nil {
		return err
	}
	s.traffic = s.startTraffic(ctx)
	if err := s.events(ctx); err != nil {
		return err
	}

	s.rec.begin("end", false)
	var gone []change
	for id, old := range s.pop.now {
		if id != 0 {
			gone = append(gone, change{old, nil})
		}
	}
	if err := s.commit(ctx, gone...); err != nil {
		return err
	}
	s.traffic.end()
	// Mode nftables keeps an entry for a removed endpoint until the first change after its grace
	// period of a second.
	sleep(ctx, 1500*time.Millisecond)
	if err := s.barrier(ctx); err != nil {
		return err
	}
	if err := errors.Join(s.leftovers(ctx, first), s.agent.Stop(syscall.SIGTERM)); err != nil {
		return err
	}
	return s.cleanUp()
}

// metricsAddr is the address of the agent's metrics and profiles.
const metricsAddr = "127.0.0.1:10249"

// newAgent makes the agent. Its folder for temporary files must be empty at the end.
func (s *soak) newAgent(ctx context.Context, dir string) (err error) {
	s.agent = nodeagent.Agent{Host: s.net.node, Dir: filepath.Join(dir, "agent"), Args: []string{
		"run", "--manifests", s.src.dir, "--hostname-override", nodeName, "--proxy-mode", s.o.mode, "--cluster-cidr", localPodCIDRs[0] + "," + localPodCIDRs[1],
		"--nodeport-addresses", "primary", "--profiling", "--metrics-bind-address", metricsAddr,
		// The limits of connection tracking apply to the whole machine.
		"--conntrack-max-per-core", "0", "--conntrack-min", "0",
	}}
	if s.agent.Bin, err = nodeagent.Find(ctx, s.o.nodeproxy, dir); err != nil {
		return fmt.Errorf("%w (see -nodeproxy)", err)
	}
	if s.agent.Log, err = filepath.Abs(s.o.logFile + ".agent"); err != nil {
		return err
	}
	s.agent.Wrap = func(c *exec.Cmd) *exec.Cmd {
		c.Env = append(os.Environ(), "TMPDIR="+s.agent.Dir, "HOME="+s.agent.Dir)
		return c
	}
	if err := os.Remove(s.agent.Log); err != nil && !errors.Is(err, os.ErrNotExist) {
		return err
	}
	return os.Mkdir(s.agent.Dir, 0o755)
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
	slices.SortFunc(changes, func(a, b change) int { return a.either().id - b.either().id })
	var names []string
	for _, c := range changes {
		s.oracle.commit(c)
		names = append(names, c.either().name())
	}
	s.rec.log.Printf("change of %s", strings.Join(names, " "))
	s.oracle.publish()
	for _, c := range changes {
		s.pop.store(c)
	}
	s.traffic.drain()
	return s.src.write(changes)
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
// the agent reads all files after a change.
func (s *soak) ping(ctx context.Context) error {
	s.barriers++
	b := barrier(s.barriers)
	if err := s.set(ctx, b); err != nil {
		return err
	}
	return s.until(ctx, "a change is not in effect", func() error {
		for f := range families {
			want := netip.AddrPortFrom(podAddr(b.endpoints[0].pod, f), podPort)
			t := target{netip.AddrPortFrom(b.addr(clusterIPs, f), uint16(b.port)), v1.ProtocolTCP}
			if o := s.net.places[0].probe(ctx, t, 2*time.Second); o.Server != want {
				return fmt.Errorf("%s: %v, want %s", t, o, want)
			}
		}
		return nil
	})
}

// until calls check until it succeeds. It records a failure if that takes longer than the flag
// -repair allows, and returns an error after two more minutes.
func (s *soak) until(ctx context.Context, failure string, check func() error) error {
	begun := time.Now()
	for complained := false; ; sleep(ctx, 10*time.Millisecond) {
		err := check()
		if ended := errors.Join(ctx.Err(), s.agent.Ended()); err == nil || ended != nil {
			return ended
		}
		if !complained && time.Since(begun) > s.o.repair {
			complained = true
			s.rec.failf("%s after %v: %v", failure, s.o.repair, err)
		}
		if time.Since(begun) > s.o.repair+2*time.Minute {
			return errors.New(failure)
		}
	}
}

// judgedEach is the number of connections judged after an event.
const judgedEach = 30

// judge makes connections from random places to random targets and judges each by Trace.
// Every change must be in effect.
func (s *soak) judge(ctx context.Context) error {
	for range judgedEach {
		s.sample(ctx, func(v *version, from *place, to target, o outcome) bool { return s.count("judged", v, from, to, o) })
	}
	return ctx.Err()
}

// repaired waits until the agent has repaired the rules: until a number of connections in
// a row are right.
func (s *soak) repaired(ctx context.Context) error {
	return s.until(ctx, "rules are not repaired", func() (err error) {
		for i := 0; i < judgedEach && err == nil; i++ {
			s.sample(ctx, func(v *version, from *place, to target, o outcome) bool {
				err = s.oracle.judge(v, from, to, o)
				return err == nil
			})
		}
		return err
	})
}

// sample makes a connection from a random place to a random target and calls right with the result.
// One in ten goes to a port or an address that no Service has. If right reports true and the
// Service has affinity, sample makes another connection.
func (s *soak) sample(ctx context.Context, right func(*version, *place, target, outcome) bool) {
	from := s.net.places[s.samples.IntN(len(s.net.places))]
	_, to, _ := s.pop.pick(s.samples)
	switch f := familyOf(to.to.Addr()); {
	case s.o.mode == "ipvs": // it does not refuse closed ports as the other modes do
	case s.samples.IntN(20) == 0:
		to.to = netip.AddrPortFrom(to.to.Addr(), uint16(7000+s.samples.IntN(1000)))
	case s.samples.IntN(20) == 0:
		to.to = netip.AddrPortFrom(number(clusterIPs[f], 40000+s.samples.IntN(10000)), 80)
	}
	v := s.oracle.since()
	verdict := v.Trace(from.packet(to))
	o := from.probe(ctx, to, patience(verdict))
	if ctx.Err() != nil || !right(v, from, to, o) || verdict.Action != ruleset.ActionForward || verdict.Affinity == 0 {
		return
	}
	again := from.probe(ctx, to, connectTimeout)
	if again.Kind == netlab.Reached && again.Server != o.Server {
		again.Kind, again.Err = netlab.Failed, fmt.Errorf("with affinity the client goes to %s and then to %s", o.Server, again.Server)
	}
	if ctx.Err() == nil {
		right(v, from, to, again)
	}
}

// sleep waits for the duration or until ctx ends.
func sleep(ctx context.Context, d time.Duration) {
	select {
	case <-ctx.Done():
	case <-time.After(d):
	}
}
