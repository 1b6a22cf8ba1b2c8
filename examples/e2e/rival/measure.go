//go:build linux

package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"math"
	"net/netip"
	"os"
	"os/exec"
	"runtime"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"github.com/go-proxier/proxier/internal/testing/netlab"
)

const (
	nodeproxy = "nodeproxy"
	kubeProxy = "kube-proxy"
)

// shortestPeriod is the minSyncPeriod of kube-proxy's second measurement. With its default of
// 1 s, most of a change's latency is a pause. A period of 0 means the default.
const shortestPeriod = time.Millisecond

// Bounds of the time until a proxy has started, and until a change is in effect.
const (
	startTimeout  = 10 * time.Minute
	changeTimeout = time.Minute
)

// measureAll makes all runs. It returns a nil report if it could not begin.
func measureAll(ctx context.Context, o *options, dir string) (*Report, error) {
	lab := netlab.New()
	defer lab.Close()
	progress("starting the API server")
	c, err := newControl(ctx, lab, o, dir)
	if err != nil {
		return nil, err
	}
	defer c.close()
	var u unix.Utsname
	if err := unix.Uname(&u); err != nil {
		return nil, err
	}
	r := &Report{Date: time.Now().UTC().Format(time.RFC3339), Kernel: unix.ByteSliceToString(u.Release[:]), CPUs: runtime.NumCPU()}
	sizes := slices.Concat(o.services, o.alone)
	slices.Sort(sizes)
	if o.outage > 0 {
		if err := c.grow(ctx, sizes[0]); err != nil {
			return r, err
		}
		var runs []Run
		for _, mode := range o.modes {
			for _, run := range o.proxies(sizes[0]) {
				run.Mode, run.Version = mode, o.version(run.Proxy)
				runs = append(runs, run)
			}
		}
		all, end := c.launchAll(ctx, o, runs)
		r.Outages, err = c.outages(ctx, o, all)
		end()
		if err != nil {
			return r, err
		}
	}
	if o.outageOnly {
		return r, nil
	}
	for _, size := range slices.Compact(sizes) {
		progress("creating Services until there are %d", size)
		if err := c.grow(ctx, size); err != nil {
			return r, err
		}
		first := len(r.Runs)
		for _, mode := range o.modes {
			for _, run := range o.proxies(size) {
				run.Mode, run.Version, run.Services, run.Endpoints = mode, o.version(run.Proxy), c.services, endpoints
				if err := c.measure(ctx, o, &run); err != nil {
					if ctx.Err() != nil {
						return r, ctx.Err()
					}
					run.Failed = err.Error()
					progress("%s, %s, %d Services: %v", run.title(), mode, size, err)
				}
				r.Runs = append(r.Runs, run)
			}
		}
		if !o.changesOnly {
			c.together(ctx, o, r.Runs[first:])
		}
		if ctx.Err() != nil {
			return r, ctx.Err()
		}
	}
	return r, nil
}

// proxies returns the proxies to measure with a number of Services, without modes.
func (o *options) proxies(size int) (out []Run) {
	if o.rival != "" && size <= maxKubeProxy && slices.Contains(o.services, size) {
		out = []Run{{Proxy: kubeProxy}, {Proxy: kubeProxy, MinSyncPeriod: shortestPeriod.String()}}
	}
	return append(out, Run{Proxy: nodeproxy})
}

// program returns the path of a proxy's program.
func (o *options) program(proxy string) string {
	if proxy == nodeproxy {
		return o.nodeproxy
	}
	return o.rival
}

// version returns what a proxy prints for --version, or "".
func (o *options) version(proxy string) string {
	text, err := exec.Command(o.program(proxy), "--version").Output()
	if err != nil {
		return ""
	}
	return strings.TrimSpace(string(text))
}

func progress(format string, args ...any) {
	fmt.Fprintf(os.Stderr, "%s %s\n", time.Now().Format("15:04:05"), fmt.Sprintf(format, args...))
}

// measure makes the run r, except for the phases that together measures.
func (c *control) measure(ctx context.Context, o *options, r *Run) error {
	changes := o.changes
	if r.Proxy == kubeProxy && r.MinSyncPeriod == "" {
		changes = o.kubeProxyChanges
	}
	progress("%s, %s, %d Services: start", r.title(), r.Mode, c.services)
	m, err := c.starts(ctx, o, r)
	if err != nil {
		return fmt.Errorf("start: %w", err)
	}
	defer m.end()
	for _, phase := range []struct {
		name string
		do   func() error
	}{
		{"changes", func() error { return m.changes(ctx, changes) }},
		{"changes of the number of endpoints", func() error { return m.resizes(ctx) }},
		{"burst", func() error { return m.burst(ctx, o.rated) }},
	} {
		if o.changesOnly && phase.name != "changes" {
			continue
		}
		progress("%s, %s, %d Services: %s", r.title(), r.Mode, c.services, phase.name)
		if err := phase.do(); err != nil {
			return errors.Join(fmt.Errorf("%s: %w", phase.name, err), m.process.ended())
		}
	}
	return nil
}

// launch starts the run's proxy on a new node. The caller must call end.
func (c *control) launch(o *options, r *Run) (_ *measurement, err error) {
	var args []string
	if r.Proxy == nodeproxy {
		args = []string{"run"}
	}
	args = append(args, "--kubeconfig", c.server.Kubeconfig(), "--hostname-override", nodeName, "--proxy-mode", r.Mode,
		// The proxies must not change the limits of connection tracking, which apply to the
		// whole machine.
		"--conntrack-max-per-core", "0", "--conntrack-min", "0")
	if r.Proxy == nodeproxy {
		args = append(args, o.extra...)
	}
	if r.MinSyncPeriod != "" {
		args = append(args, "--iptables-min-sync-period", r.MinSyncPeriod) // in mode nftables, too
	}
	c.launched++
	m := &measurement{control: c, run: r}
	if m.node, err = newNode(c, c.launched); err != nil {
		return nil, err
	}
	m.began = time.Now()
	m.last = spent{when: m.began, stolen: stolen()}
	if m.process, err = m.node.startProxy(o.program(r.Proxy), args, o.logs, fmt.Sprintf("%s-%s-%d-%d", r.Proxy, r.Mode, c.services, c.launched)); err != nil {
		m.node.close()
		return nil, err
	}
	return m, nil
}

// end stops the proxy and removes its node.
func (m *measurement) end() {
	m.process.stop()
	m.node.close()
}

// startsLength bounds the time for the starts of one run, except for the first start.
const startsLength = 40 * time.Second

// starts starts the proxy several times, each time on a new node, and stores the median start.
// It returns the last one, which runs.
func (c *control) starts(ctx context.Context, o *options, r *Run) (*measurement, error) {
	var all []Start
	for began := time.Now(); ; {
		m, err := c.launch(o, r)
		if err != nil {
			return nil, err
		}
		s, err := m.start(ctx)
		if err != nil {
			m.end()
			return nil, err
		}
		all = append(all, s)
		if len(all) == o.starts || time.Since(began) > startsLength {
			slices.SortFunc(all, func(a, b Start) int { return cmp.Compare(a.Seconds, b.Seconds) })
			r.Start = all[len(all)/2]
			r.Start.Count, r.Start.MinSeconds, r.Start.MaxSeconds = len(all), all[0].Seconds, all[len(all)-1].Seconds
			return m, nil
		}
		m.end()
	}
}

// measurement is one run while it is made.
type measurement struct {
	*control
	node    *node
	process *process
	began   time.Time // the start of the process
	run     *Run
	// last is the reading at the end of the last phase, or at the start of the process.
	last spent
}

// used ends a phase and stores the proxy's resource usage since the last call.
func (m *measurement) used(u *Usage) (err error) {
	*u, m.last, err = m.process.since(m.last)
	m.process.resetPeak()
	return err
}

// sampled is the number of Services that measure the start.
const sampled = 64

// start waits until every Service answers.
func (m *measurement) start(ctx context.Context) (s Start, err error) {
	end := m.began.Add(startTimeout)
	answers := func(service int) error {
		for {
			_, err := visit(service)
			if err == nil {
				return nil
			}
			if e := errors.Join(ctx.Err(), m.process.ended()); e != nil {
				return e
			}
			if time.Now().After(end) {
				return fmt.Errorf("service %d does not answer: %w", service, err)
			}
			time.Sleep(time.Millisecond)
		}
	}
	err = m.node.host.Do(func() error {
		for i := range sampled {
			if err := answers(i * (m.services - 1) / (sampled - 1)); err != nil {
				return err
			}
		}
		s.Seconds = time.Since(m.began).Seconds()
		if err := m.used(&s.Usage); err != nil {
			return err
		}
		for i := range m.services {
			if _, err := visit(i); err == nil {
				continue
			}
			if err := answers(i); err != nil {
				return err
			}
			s.Seconds = time.Since(m.began).Seconds()
		}
		return nil
	})
	if err != nil {
		return s, err
	}
	// The start's background work counts as the start's CPU time.
	time.Sleep(phaseRest)
	before := s.Usage
	if err := m.used(&s.Usage); err != nil {
		return s, err
	}
	s.CPUSeconds += before.CPUSeconds
	s.Stolen = before.Stolen
	s.PeakMiB = max(s.PeakMiB, before.PeakMiB)
	return s, nil
}

// phaseRest is the pause after a phase. The phase's deferred work, such as the sync at the
// end of a proxy's rate limit, counts as part of the phase.
const phaseRest = 1500 * time.Millisecond

// startRest is the pause before the idle phase. After it the deferred work of the start is over.
const startRest = 30 * time.Second

func quantiles(list []time.Duration) Quantiles {
	return Quantiles{P50ms: quantile(list, 0.5), P99ms: quantile(list, 0.99), MaxMs: quantile(list, 1)}
}

// quantile returns the nearest-rank quantile in milliseconds.
func quantile(list []time.Duration, q float64) float64 {
	if len(list) == 0 {
		return 0
	}
	sorted := slices.Sorted(slices.Values(list))
	i := min(int(q*float64(len(sorted))), len(sorted)-1)
	return sorted[i].Seconds() * 1000
}

// scattered returns the i-th Service in an order that jumps between distant Services.
func (m *measurement) scattered(i int) int { return i * 7919 % m.services }

func (m *measurement) changes(ctx context.Context, n int) error {
	l, err := m.oneByOne(ctx, n, func(i int) (int, int, error) {
		s := m.scattered(i)
		set, err := m.change(ctx, s)
		return s, set, err
	})
	m.run.Change = l
	return err
}

func (m *measurement) resizes(ctx context.Context) error {
	// Sizes near the usual one first, then small ones.
	sizes := []int{endpoints + 1, endpoints + 5, endpoints - 1, 3, 1}
	l, err := m.oneByOne(ctx, len(sizes), func(i int) (int, int, error) {
		s := m.scattered(i)
		return s, resized, m.resize(ctx, s, sizes[i])
	})
	m.run.Resize = l
	for i := range sizes {
		if _, e := m.change(ctx, m.scattered(i)); e != nil { // as many endpoints as before
			err = errors.Join(err, e)
		}
	}
	time.Sleep(phaseRest)
	return errors.Join(err, m.used(new(Usage)))
}

// oneByOne measures how long each of n changes takes. change makes one change, and returns
// the Service and its new set of endpoints.
func (m *measurement) oneByOne(ctx context.Context, n int, change func(int) (service, set int, err error)) (Latency, error) {
	if err := m.used(new(Usage)); err != nil {
		return Latency{}, err
	}
	var took []time.Duration
	for i := range n {
		time.Sleep(gap)
		service, set, err := change(i)
		if err != nil {
			return Latency{}, err
		}
		answered := time.Now()
		err = m.node.host.Do(func() error { return arrives(ctx, service, set, answered.Add(changeTimeout)) })
		if err != nil {
			return Latency{}, err
		}
		took = append(took, time.Since(answered))
	}
	l := Latency{Count: n, Quantiles: quantiles(took)}
	return l, m.used(&l.Usage)
}

// watchedChanges is the number of changes in a burst whose latency is measured.
const watchedChanges = 50

// watched is a change whose latency is measured.
type watched struct {
	service, set int
	answered     time.Time
}

func (m *measurement) burst(ctx context.Context, n int) error {
	if err := m.used(new(Usage)); err != nil {
		return err
	}
	made := make(chan watched, watchedChanges)
	var took []time.Duration
	var watching sync.WaitGroup
	var failed error
	watching.Go(func() {
		failed = m.node.host.Do(func() (err error) {
			took, err = watchAll(ctx, made)
			return err
		})
	})
	// Watched Services change once, the others as often as necessary. One worker makes all
	// changes of a Service, so they are made in order.
	others := m.services - watchedChanges
	every := n / watchedChanges
	of := func(i int) (service int, watch bool) {
		if i%every == 0 && i/every < watchedChanges {
			return i / every, true
		}
		return watchedChanges + i%others, false
	}
	began := time.Now()
	var last atomic.Int64
	perWorker := make([][]int, workers)
	for i := range n {
		service, _ := of(i)
		perWorker[service%workers] = append(perWorker[service%workers], i)
	}
	err := parallel(workers, func(w int) error {
		for _, i := range perWorker[w] {
			time.Sleep(time.Until(began.Add(time.Duration(i) * time.Second / rate)))
			service, watch := of(i)
			set, err := m.change(ctx, service)
			if err != nil {
				return err
			}
			now := time.Now()
			last.Store(max(last.Load(), int64(now.Sub(began))))
			if watch {
				made <- watched{service: service, set: set, answered: now}
			}
		}
		return nil
	})
	close(made)
	watching.Wait()
	if err := errors.Join(err, failed); err != nil {
		return err
	}
	seconds := time.Since(began).Seconds()
	b := Burst{Changes: n, Seconds: seconds, Quantiles: quantiles(took)}
	sent := time.Duration(last.Load())
	b.PerSecond = float64(n) / sent.Seconds()
	time.Sleep(phaseRest)
	err = m.used(&b.Usage)
	b.Core = b.CPUSeconds / sent.Seconds()
	m.run.Burst = b
	return err
}

// watchAll connects to the Services of the changes in turn until each change is in effect.
// It returns how long each took, in the order in which they came into effect.
func watchAll(ctx context.Context, made <-chan watched) (took []time.Duration, err error) {
	var pending []watched
	for open := true; open || len(pending) != 0; {
		if len(pending) == 0 {
			w, ok := <-made
			if open = ok; !ok {
				continue
			}
			pending = append(pending, w)
		}
		for more := true; more && open; {
			select {
			case w, ok := <-made:
				if open = ok; ok {
					pending = append(pending, w)
				}
			default:
				more = false
			}
		}
		pending = slices.DeleteFunc(pending, func(w watched) bool {
			a, err := visit(w.service)
			if err != nil {
				return false
			}
			if _, set := setOf(a); set != w.set {
				return false
			}
			took = append(took, time.Since(w.answered))
			return true
		})
		if len(pending) != 0 && time.Since(pending[0].answered) > changeTimeout {
			return took, fmt.Errorf("a change of service %d is not in effect after %s", pending[0].service, changeTimeout)
		}
		if ctx.Err() != nil {
			return took, ctx.Err()
		}
	}
	return took, nil
}

// together measures what does not change the Services: the idle phase and connections. It starts
// the proxies of all runs again, each on a new node, and measures them at the same time or in
// turn, so that the host's other guests affect all of them alike.
func (c *control) together(ctx context.Context, o *options, runs []Run) {
	all, end := c.launchAll(ctx, o, runs)
	defer end()
	if o.idle > 0 {
		progress("all proxies, %d Services: idle", c.services)
		idle(ctx, o.idle, all)
	}
	progress("all proxies, %d Services: connections", c.services)
	connections(ctx, o.rounds, all)
}

// launchAll starts the proxies of all runs, each on a new node. The caller must call end. It leaves
// out runs that failed.
func (c *control) launchAll(ctx context.Context, o *options, runs []Run) (all []*measurement, end func()) {
	end = func() {
		for _, m := range all {
			m.end()
		}
	}
	for i := range runs {
		r := &runs[i]
		if r.Failed != "" {
			continue
		}
		progress("%s, %s, %d Services: start beside the others", r.title(), r.Mode, c.services)
		m, err := c.launch(o, r)
		if err != nil {
			r.fail(err)
			continue
		}
		if _, err := m.start(ctx); err != nil {
			m.end()
			r.fail(err)
			continue
		}
		all = append(all, m)
	}
	return all, end
}

// fail records an error that ended a run.
func (r *Run) fail(err error) {
	r.Failed = err.Error()
	progress("%s, %s, %d Services: %s", r.title(), r.Mode, r.Services, r.Failed)
}

func idle(ctx context.Context, length time.Duration, all []*measurement) {
	pause(ctx, startRest)
	before := make([]spent, len(all))
	for i, m := range all {
		if err := m.used(new(Usage)); err != nil {
			m.run.fail(fmt.Errorf("idle: %w", err))
		}
		before[i] = m.last
	}
	pause(ctx, length)
	for i, m := range all {
		idle := Idle{}
		if err := errors.Join(ctx.Err(), m.process.ended(), m.used(&idle.Usage)); err != nil {
			m.run.fail(fmt.Errorf("idle: %w", err))
			continue
		}
		idle.Seconds = m.last.when.Sub(before[i].when).Seconds()
		m.run.Idle = idle
	}
}

// connections measures the proxies in turn, in many short rounds: the rate changes by a tenth from
// one second to the next.
func connections(ctx context.Context, rounds int, all []*measurement) {
	const clients, length = 2, 200 * time.Millisecond
	service, direct := make([][]float64, len(all)), make([][]float64, len(all))
	for round := range rounds {
		for i, m := range all {
			if ctx.Err() != nil {
				return
			}
			if m.run.Failed != "" {
				continue
			}
			last := m.services - 1
			through := func() error {
				r, err := m.node.connections(netip.AddrPortFrom(clusterIP(last), servicePort), clients, length)
				service[i] = append(service[i], r)
				return err
			}
			straight := func() error {
				r, err := m.node.connections(netip.AddrPortFrom(endpoint(last, m.generation[last], 0), endpointPort), clients, length)
				direct[i] = append(direct[i], r)
				return err
			}
			first, second := through, straight
			if round%2 == 1 {
				first, second = straight, through
			}
			if err := errors.Join(first(), second()); err != nil {
				m.run.fail(fmt.Errorf("connections: %w", err))
			}
		}
	}
	for i, m := range all {
		if m.run.Failed == "" {
			m.run.Connections = rates(service[i], direct[i])
		}
	}
}

// rates returns the means of the rates in several rounds.
func rates(service, direct []float64) Connections {
	n := float64(len(service))
	var c Connections
	for i := range service {
		c.PerSecond += service[i] / n
		c.DirectPerSecond += direct[i] / n
	}
	c.Rounds, c.Share = len(service), c.PerSecond/c.DirectPerSecond
	// The error of a quotient of means, by the differences from it in each round.
	var squares float64
	for i := range service {
		squares += math.Pow(service[i]-c.Share*direct[i], 2)
	}
	if n > 1 {
		c.ShareError = math.Sqrt(squares/n/(n-1)) / c.DirectPerSecond
	}
	return c
}

// pause waits until the time is over or ctx ends.
func pause(ctx context.Context, d time.Duration) {
	select {
	case <-ctx.Done():
	case <-time.After(d):
	}
}
