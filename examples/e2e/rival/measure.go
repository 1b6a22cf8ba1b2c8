//go:build linux

package main

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sync/errgroup"
	"golang.org/x/sys/unix"

	"github.com/go-proxier/proxier/examples/internal/process"
	"github.com/go-proxier/proxier/internal/testing/netlab"
)

const (
	nodeproxy = "nodeproxy"
	kubeProxy = "kube-proxy"
)

// shortestPeriod is the minSyncPeriod of kube-proxy's second measurement. With its default of
// 1 s, most of a change's latency is a pause.
const shortestPeriod = "1ms"

// Bounds of the time until a proxy has started, and until a change is in effect.
const (
	startTimeout  = 10 * time.Minute
	changeTimeout = time.Minute
)

// measureAll makes all runs. It returns a nil report if it could not begin.
func measureAll(ctx context.Context, o *options) (*Report, error) {
	lab := netlab.New()
	defer lab.Close()
	progress("starting the API server")
	c, err := newControl(ctx, lab, o.dir)
	if err != nil {
		return nil, err
	}
	defer c.server.Close()
	var u unix.Utsname
	if err := unix.Uname(&u); err != nil {
		return nil, err
	}
	r := &Report{Date: time.Now().UTC().Format(time.RFC3339), Kernel: unix.ByteSliceToString(u.Release[:]), CPUs: runtime.NumCPU()}
	for i, size := range o.services {
		progress("creating Services until there are %d", size)
		if err := c.grow(ctx, size); err != nil {
			return r, err
		}
		runs := o.proxies(size)
		for i := range runs {
			if err := c.measure(ctx, o, &runs[i]); err != nil {
				runs[i].fail(err)
			}
		}
		if !o.changesOnly {
			err = c.measureTogether(ctx, o, runs, i == 0 && o.outage > 0)
		}
		r.Runs = append(r.Runs, runs...)
		if err := errors.Join(err, ctx.Err()); err != nil {
			return r, err
		}
	}
	return r, nil
}

// proxies returns the runs to make with a number of Services.
func (o *options) proxies(size int) (out []Run) {
	for _, mode := range o.modes {
		add := func(proxy, period string) {
			version, _ := exec.Command(o.program(proxy), "--version").Output()
			out = append(out, Run{Proxy: proxy, MinSyncPeriod: period, Version: strings.TrimSpace(string(version)), Mode: mode, Services: size})
		}
		if o.kubeProxy != "" && size <= maxKubeProxy {
			add(kubeProxy, "")
			add(kubeProxy, shortestPeriod)
		}
		add(nodeproxy, "")
	}
	return out
}

// program returns the path of a proxy's program.
func (o *options) program(proxy string) string {
	if proxy == nodeproxy {
		return o.nodeproxy
	}
	return o.kubeProxy
}

func progress(format string, args ...any) {
	fmt.Fprintf(os.Stderr, "%s %s\n", time.Now().Format("15:04:05"), fmt.Sprintf(format, args...))
}

// measure makes the run r, except for connections.
func (c *control) measure(ctx context.Context, o *options, r *Run) error {
	m, err := c.starts(ctx, o, r)
	if err != nil {
		return fmt.Errorf("start: %w", err)
	}
	defer m.end()
	changes := o.changes
	if r.Proxy == kubeProxy && r.MinSyncPeriod == "" {
		changes = o.kubeProxyChanges
	}
	r.progress("changes")
	if err := m.changes(ctx, changes); err != nil {
		return fmt.Errorf("changes: %w", err)
	}
	if o.changesOnly {
		return nil
	}
	r.progress("burst")
	if err := m.burst(ctx, o.rated); err != nil {
		return fmt.Errorf("burst: %w", err)
	}
	return nil
}

// progress prints what is measured.
func (r *Run) progress(what string) {
	progress("%s, %s, %d Services: %s", r.title(), r.Mode, r.Services, what)
}

// fail records an error that ended a run.
func (r *Run) fail(err error) {
	r.Failed = err.Error()
	r.progress(r.Failed)
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
	if r.MinSyncPeriod != "" {
		args = append(args, "--iptables-min-sync-period", r.MinSyncPeriod) // in mode nftables, too
	}
	c.launched++
	m := &measurement{control: c, run: r}
	if m.node, err = newNode(c, c.launched); err != nil {
		return nil, err
	}
	m.began = time.Now()
	log := filepath.Join(o.dir, fmt.Sprintf("%s-%s-%d-%d.log", r.Proxy, r.Mode, c.services, c.launched))
	if m.process, err = process.Start(m.node.host, exec.Command(o.program(r.Proxy), args...), log); err != nil {
		m.node.close()
		return nil, err
	}
	return m, nil
}

// end stops the proxy and removes its node.
func (m *measurement) end() {
	m.process.Stop(syscall.SIGTERM)
	m.node.close()
}

// startsLength bounds the time for the starts of one run, except for the first start.
const startsLength = 40 * time.Second

// starts starts the proxy several times, each time on a new node, and stores the median start.
// It returns the last one, which runs.
func (c *control) starts(ctx context.Context, o *options, r *Run) (*measurement, error) {
	var all []Start
	r.progress("start")
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
			return m, nil
		}
		m.end()
	}
}

// measurement is one run while it is made.
type measurement struct {
	*control
	node    *node
	process *process.Process
	began   time.Time // the start of the process
	run     *Run
	cpu     time.Duration // used before the current phase
}

// used ends a phase and stores the proxy's resource usage since the last call.
func (m *measurement) used(u *Usage) (err error) {
	proc := fmt.Sprintf("/proc/%d/", m.process.Process.Pid)
	stat, err := os.ReadFile(proc + "stat")
	if err != nil {
		return err
	}
	// Fields from the third on (proc_pid_stat(5)), behind the name: cutime and cstime.
	f := strings.Fields(string(stat[bytes.LastIndexByte(stat, ')')+1:]))
	children, _ := strconv.Atoi(f[16-3])
	childrenInKernel, _ := strconv.Atoi(f[17-3])
	// The CPU clock of another process (linux/posix-timers.h, CPUCLOCK_SCHED).
	var own unix.Timespec
	if err := unix.ClockGettime(int32(^m.process.Process.Pid<<3|2), &own); err != nil {
		return os.NewSyscallError("clock_gettime", err)
	}
	cpu := time.Duration(own.Nano()) + time.Duration(children+childrenInKernel)*time.Second/userHZ
	u.CPUSeconds, m.cpu = (cpu - m.cpu).Seconds(), cpu
	status, err := os.ReadFile(proc + "status")
	if _, peak, ok := bytes.Cut(status, []byte("VmHWM:")); ok {
		var kiB float64
		fmt.Sscan(string(peak), &kiB)
		u.PeakMiB = kiB / 1024
	}
	return errors.Join(err, os.WriteFile(proc+"clear_refs", []byte("5"), 0)) // begins a new peak
}

// userHZ is the number of ticks per second in /proc/PID/stat. It is the same on every
// architecture that Go supports (linux/asm-generic/param.h).
const userHZ = 100

// sampled is the number of Services that measure the start.
const sampled = 64

// start waits until every Service answers.
func (m *measurement) start(ctx context.Context) (s Start, err error) {
	for i := range sampled + m.services {
		service := i - sampled
		if service < 0 {
			service = i * (m.services - 1) / (sampled - 1)
		}
		attempts, err := m.reach(ctx, service, anySet, m.began.Add(startTimeout), time.Millisecond)
		if err != nil {
			return s, err
		}
		if i < sampled || attempts > 1 {
			s.Seconds = time.Since(m.began).Seconds()
		}
	}
	time.Sleep(phaseRest)
	return s, m.used(&s.Usage)
}

// anySet stands for both sets of a Service's endpoints.
const anySet = -1

// reach connects to a Service, with a pause after each attempt, until an endpoint of the set answers. Several
// calls take turns.
func (m *measurement) reach(ctx context.Context, service, set int, end time.Time, pause time.Duration) (attempts int, err error) {
	err = m.node.host.Do(func() error {
		for {
			m.node.visiting.Lock()
			answered, err := visit(service)
			m.node.visiting.Unlock()
			attempts++
			if err == nil && (set == anySet || answered == set) {
				return nil
			}
			if stop := errors.Join(ctx.Err(), m.process.Ended()); stop != nil {
				return stop
			}
			if time.Now().After(end) {
				return fmt.Errorf("service %d does not answer with set %d: last answer from set %d, error %v", service, set, answered, err)
			}
			time.Sleep(pause)
		}
	})
	return attempts, err
}

// phaseRest is the pause after a phase. The phase's deferred work, such as the sync at the
// end of a proxy's rate limit, counts as part of the phase.
const phaseRest = 1500 * time.Millisecond

// latency returns the latency of changes: quantiles by nearest rank.
func latency(took []time.Duration) Latency {
	slices.Sort(took)
	quantile := func(q float64) float64 {
		return took[min(int(q*float64(len(took))), len(took)-1)].Seconds() * 1000
	}
	return Latency{Count: len(took), P50ms: quantile(0.5), P99ms: quantile(0.99), MaxMs: quantile(1)}
}

// arrival makes a change and returns the time from the API server's answer until it is in effect.
func (m *measurement) arrival(ctx context.Context, service int) (time.Duration, error) {
	set, err := m.change(ctx, service)
	if err != nil {
		return 0, err
	}
	answered := time.Now()
	_, err = m.reach(ctx, service, set, answered.Add(changeTimeout), 0)
	return time.Since(answered), err
}

// changes measures how long each of n changes takes, one by one.
func (m *measurement) changes(ctx context.Context, n int) error {
	took := make([]time.Duration, n)
	for i := range took {
		time.Sleep(gap)
		var err error
		if took[i], err = m.arrival(ctx, i*7919%m.services); err != nil { // jumps between distant Services
			return err
		}
	}
	m.run.Change = latency(took)
	return m.used(&m.run.Change.Usage)
}

// watchedChanges is the number of changes in a burst whose latency is measured.
const watchedChanges = 50

// burst makes n changes at a rate. The first Services change once and are watched, the others as often as
// necessary.
func (m *measurement) burst(ctx context.Context, n int) error {
	took := make([]time.Duration, watchedChanges)
	began := time.Now()
	due := func(i int) { time.Sleep(time.Until(began.Add(time.Duration(i) * time.Second / rate))) }
	every := n / watchedChanges
	g, ctx := errgroup.WithContext(ctx)
	for i := range took {
		g.Go(func() (err error) {
			due(i * every)
			took[i], err = m.arrival(ctx, i)
			return err
		})
	}
	for worker := range workers {
		g.Go(func() error {
			for i := range n {
				// One worker makes all changes of a Service, so they are made in order.
				service := watchedChanges + i%(m.services-watchedChanges)
				if i%every == 0 || service%workers != worker {
					continue
				}
				due(i)
				if _, err := m.change(ctx, service); err != nil {
					return err
				}
			}
			return nil
		})
	}
	if err := g.Wait(); err != nil {
		return err
	}
	time.Sleep(phaseRest)
	m.run.Burst = latency(took)
	return m.used(&m.run.Burst.Usage)
}

// measureTogether starts the proxies of all runs that have not failed, each on a new node, so that the host's
// other guests affect all of them alike, and measures connections and outages.
func (c *control) measureTogether(ctx context.Context, o *options, runs []Run, outages bool) error {
	var all []*measurement
	for i := range runs {
		r := &runs[i]
		if r.Failed != "" {
			continue
		}
		r.progress("start beside the others")
		m, err := c.launch(o, r)
		if err == nil {
			defer m.end()
			all = append(all, m)
			_, err = m.start(ctx)
		}
		if err != nil {
			r.fail(err)
		}
	}
	connections(ctx, o.rounds, all)
	if !outages {
		return nil
	}
	return c.outages(ctx, o, all)
}

// connections measures the proxies in turn, in many short rounds: the rate changes by a tenth from
// one second to the next.
func connections(ctx context.Context, rounds int, all []*measurement) {
	progress("all proxies: connections")
	for round := range rounds {
		for _, m := range all {
			if ctx.Err() != nil || m.run.Failed != "" {
				continue
			}
			last := m.services - 1
			through, direct := &m.run.Connections.PerSecond, &m.run.Connections.DirectPerSecond
			order := []*float64{through, direct}
			if round%2 == 1 {
				slices.Reverse(order)
			}
			for _, sum := range order {
				to := netip.AddrPortFrom(clusterIP(last), servicePort)
				if sum == direct {
					to = netip.AddrPortFrom(endpoint(last, m.generation[last], 0), endpointPort)
				}
				perSecond, err := m.node.connections(to)
				if *sum += perSecond / float64(rounds); err != nil {
					m.run.fail(fmt.Errorf("connections: %w", err))
				}
			}
		}
	}
}

// followTimeout bounds the time until a proxy follows the API server again.
const followTimeout = 3 * time.Minute

// outages kills the API server, starts it again, and measures how long each proxy takes to follow it.
func (c *control) outages(ctx context.Context, o *options, all []*measurement) error {
	for i := range o.extent.outages {
		progress("all proxies: outage %d", i+1)
		c.server.Kill()
		select {
		case <-ctx.Done():
		case <-time.After(o.outage):
		}
		if err := c.server.Run(ctx); err != nil {
			return err
		}
		ready := time.Now()
		set, err := c.change(ctx, 0)
		if err != nil {
			return err
		}
		var wg sync.WaitGroup
		for _, m := range all {
			wg.Go(func() {
				// It pauses between attempts, because the machine has other work.
				if _, err := m.reach(ctx, 0, set, ready.Add(followTimeout), 10*time.Millisecond); err != nil {
					m.run.fail(err)
					return
				}
				m.run.FollowedSeconds = append(m.run.FollowedSeconds, time.Since(ready).Seconds())
			})
		}
		wg.Wait()
	}
	return nil
}
