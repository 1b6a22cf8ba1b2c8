package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/netip"
	"os"
	"path"
	"strings"
	"sync"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/go-proxier/proxier/conntrack"
	"github.com/go-proxier/proxier/examples/nodeproxy/internal/config"
	"github.com/go-proxier/proxier/examples/nodeproxy/internal/kubeapi"
	"github.com/go-proxier/proxier/examples/nodeproxy/internal/metrics"
	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/runner"
	"github.com/go-proxier/proxier/runner/health"
	"github.com/go-proxier/proxier/tracker"
)

const (
	// fullSyncPeriod is how often everything is compared and repaired, as by
	// kube-proxy.
	fullSyncPeriod = time.Hour
	// shutdownTimeout is how long servers may take to finish what they have begun.
	shutdownTimeout = 2 * time.Second
)

// The reasons of the agent's own Events, as kube-proxy has them.
const (
	reasonStarting           = "Starting"
	reasonHealthzFailed      = "FailedToStartProxierHealthcheck"
	reasonMetricsFailed      = "FailedToStartMetricServer"
	reasonServiceCheckFailed = "FailedToStartServiceHealthcheck"
	reasonIPVSDeprecation    = "IPVSDeprecation"
	component                = "nodeproxy"
)

// ipvsDeprecation is told to operators of mode ipvs, as kube-proxy does.
const ipvsDeprecation = "mode ipvs is deprecated in Kubernetes: prefer mode nftables"

// agent keeps a network namespace in agreement with a source.
type agent struct {
	*world
	out   io.Writer // gets a line for each change that is in effect
	modes []mode

	source   source
	mode     mode
	plane    dataplane
	udp      *conntrack.Cleaner // nil if the system has no such thing
	proxy    *health.Proxy
	ports    *health.NodePorts
	metrics  *metrics.Set
	recorder *kubeapi.Recorder // nil without an API server
	servers  []*server
	families []tracker.Family
	started  time.Time

	rules *ruleset.Cursor
	// followers are synced when the rules are in effect.
	followers []*ruleset.Cursor
	runner    *runner.Runner
	closers   []io.Closer

	// mu makes what a change of the manifests brings one step: it is held while
	// objects are handed in, and while they are synced.
	mu sync.Mutex
	// due: a line is to be written once what was handed in last, at fed, is in
	// effect.
	due bool
	fed time.Time
	// asked is when the oldest change was handed in that no sync has taken, for
	// sources whose changes come one by one.
	asked atomicTime
	// tidied: the rules of other modes have been removed, as far as that can be done
	// at once. inEffect is closed when the rules are for the first time.
	tidied   bool
	inEffect chan struct{}
	// What the last Apply did.
	applied time.Time
	changed int
	// And what the last Sync came to.
	synced ruleset.SyncInfo
}

// newAgent makes an agent for the network namespace of the calling thread. It
// needs that thread no more when it returns, but for servers.
func newAgent(ctx context.Context, cfg *config.Config, modes []mode, out io.Writer, log *slog.Logger) (_ *agent, err error) {
	a := &agent{out: out, modes: modes, started: time.Now(), inEffect: make(chan struct{})}
	defer func() {
		if err != nil {
			a.close()
		}
	}()
	m, err := findMode(modes, cfg.Mode)
	if err != nil {
		return nil, err
	}
	a.mode = m
	nl, err := netlink.NewHandle(unix.NETLINK_ROUTE)
	if err != nil {
		return nil, fmt.Errorf("netlink: %w", err)
	}
	a.closers = append(a.closers, closeFunc(nl.Close))
	src, client, err := newSource(cfg, log)
	if err != nil {
		return nil, err
	}
	a.source = src
	a.closers = append(a.closers, closeFunc(src.close))
	if f, ok := src.(*files); ok {
		f.locked = a.handIn
	}

	// All that may fail for want of privileges or kernel features comes first.
	if a.families, err = servedFamilies(ctx, m, cfg, hasIPv6(), log); err != nil {
		return nil, err
	}
	a.metrics = metrics.NewSet(metrics.Config{Mode: cfg.Mode, Families: a.families})
	cfg.Gates.AddMetrics()
	if a.plane, err = m.open(ctx, settings{cfg, a.families, a.metrics.Rules, a.metrics.WatchCounters, log}); err != nil {
		return nil, err
	}
	a.closers = append(a.closers, a.plane)
	var backend ruleset.Backend = ruleset.BackendFunc(a.apply)
	if udp, err := conntrack.New(conntrack.Config{Log: log, Trace: &conntrack.Trace{FlushedFamily: a.metrics.Flushed}}); err != nil {
		log.Warn("stale UDP flows will not be cleaned up", "error", err)
	} else {
		a.udp = udp
		a.closers = append(a.closers, udp)
		backend = conntrack.After(backend, udp)
	}
	tune(cfg, log)
	checkForwarding(a.families, cfg.Mode, log)

	a.proxy, err = health.NewProxy(health.ProxyConfig{Timeout: 2 * cfg.SyncPeriod, Families: a.families, Answered: a.metrics.Answered})
	if err != nil {
		return nil, err
	}
	hooks := worldHooks{
		own:            func() ([]netip.Addr, error) { return ownAddresses(nl) },
		receiveService: a.metrics.ReceiveService,
		receiveSlice:   a.metrics.ReceiveSlice,
		eligible:       a.proxy.SetEligible,
	}
	if client != nil {
		a.recorder = kubeapi.NewRecorder(client, component, cfg.NodeName)
		a.closers = append(a.closers, closeFunc(a.recorder.Shutdown))
		hooks.events = a.recorder
	}
	node, err := src.node(ctx, cfg.Effective.DetectLocalMode == config.NodeCIDR)
	if err != nil {
		return nil, err
	}
	if client != nil || node != nil {
		// With an API server /healthz waits for the Node object, as kube-proxy's does.
		a.proxy.SetEligible(health.Eligible(node))
	}
	if a.world, err = newWorld(cfg, a.families, node, hooks, log); err != nil {
		return nil, err
	}
	a.ports = health.NewNodePorts(health.NodePortsConfig{
		Services: health.NewServices(health.ServicesConfig{ProxyHealthy: a.proxy.Healthy}),
		Families: a.families,
		Failed:   a.serviceCheckFailed,
		Log:      log,
	})
	a.rules = a.engine.Attach(cfg.Mode, backend)
	a.rules.OnSync(func(i ruleset.SyncInfo) {
		a.synced = i
		a.metrics.Synced(i)
	})
	a.followers = []*ruleset.Cursor{a.engine.Attach("health", a.ports), a.engine.Attach("metrics", a.metrics)}
	a.runner, err = runner.New(runner.Config{
		Min:    cfg.MinSyncPeriod,
		Pace:   cfg.Pace,
		Retry:  cfg.SyncPeriod,
		Max:    max(fullSyncPeriod, cfg.MinSyncPeriod, cfg.Pace.Most),
		Resync: a.rules.Resync,
		Log:    log,
		Trace:  &runner.Trace{Queued: a.queued, SyncStart: a.starting},
	}, a.sync)
	if err != nil {
		return nil, err
	}
	a.engine.Notify(func() {
		a.asked.setIfZero(time.Now())
		a.runner.Trigger()
	})
	a.servers = a.newServers()
	return a, nil
}

type closeFunc func()

func (f closeFunc) Close() error { f(); return nil }

// close gives up everything but the rules.
func (a *agent) close() {
	for i := len(a.closers) - 1; i >= 0; i-- {
		a.closers[i].Close()
	}
}

// run keeps the kernel in agreement until parent ends or something fails that
// cannot be tried again. The rules stay.
func (a *agent) run(parent context.Context) error {
	defer a.close()
	ctx, stop := context.WithCancelCause(parent)
	defer stop(nil)
	a.failed = func(err error) { stop(err) }
	a.nodeEvent(false, reasonStarting, "")
	if a.cfg.Mode == config.ModeIPVS {
		a.log.Warn(ipvsDeprecation)
		a.nodeEvent(true, reasonIPVSDeprecation, ipvsDeprecation)
	}
	loops := []func(context.Context) error{
		a.runner.Run, a.followSource, a.followNode, a.watchRules, a.watchConfig, a.retireOthers,
	}
	for _, s := range a.servers {
		loops = append(loops, s.run)
	}
	var wg sync.WaitGroup
	for _, f := range loops {
		wg.Go(func() {
			if err := f(ctx); err != nil {
				stop(err)
			}
		})
	}
	wg.Wait()
	down, cancel := context.WithTimeout(context.Background(), shutdownTimeout)
	defer cancel()
	a.ports.Close(down)
	if parent.Err() != nil {
		return nil
	}
	return context.Cause(ctx)
}

// followSource hands in what the source has.
func (a *agent) followSource(ctx context.Context) error { return a.source.follow(ctx, a.world) }

// queued fits [runner.Trace].
func (a *agent) queued(at time.Time) {
	a.proxy.Queued()
	a.metrics.Queued(at)
}

// starting fits [runner.Trace]. Before everything was listed, a sync takes no changes.
func (a *agent) starting(runner.Info) {
	if a.tracker.Synced() {
		a.metrics.Starting()
	}
}

// sync brings the kernel up to date. An error makes the runner call it again.
func (a *agent) sync(ctx context.Context) error {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.applied, a.changed = time.Time{}, 0
	asked := a.asked.take()
	a.proxy.Started()
	err := a.rules.Sync(ctx)
	failed := 0
	if p := (*ruleset.PartialError)(nil); errors.As(err, &p) {
		failed = len(p.Failed)
	}
	inEffect := err == nil || failed != 0
	if a.tracker.Synced() {
		// A Service that cannot be programmed does not make the node useless.
		a.proxy.Done(inEffect)
	}
	if inEffect {
		a.report(failed, asked)
		for _, c := range a.followers {
			err = errors.Join(err, c.Sync(ctx))
		}
		err = errors.Join(err, a.tidy(ctx))
	}
	if a.udp != nil {
		err = errors.Join(err, a.udp.Flush(ctx)) // if it failed before
	}
	return err
}

// tidy removes, once the rules are in effect, those that another mode or, if the
// agent is to take over from it, kube-proxy has left. Before that they carry the
// traffic.
func (a *agent) tidy(ctx context.Context) error {
	if a.tidied || !a.tracker.Synced() {
		return nil
	}
	if err := leftovers(ctx, a.modes, a.cfg.Mode, a.cfg.Adopt, a.log); err != nil {
		a.metrics.CleanupFailed()
		return err
	}
	a.tidied = true
	close(a.inEffect)
	return nil
}

// report writes the line about the change that is in effect: of the manifests, or
// else any that made a difference to the rules.
func (a *agent) report(failed int, asked time.Time) {
	if _, ok := a.source.(*files); !ok {
		a.due, a.fed = a.synced.Applied && a.tracker.Synced(), asked
		if asked.IsZero() {
			a.fed = a.synced.Start
		}
	}
	if !a.due {
		return
	}
	a.due = false
	if a.applied.IsZero() {
		a.applied = time.Now() // there was nothing to do
	}
	line := fmt.Sprintf("synced services=%d endpoints=%d changed=%d took=%v",
		a.synced.Services, a.synced.Endpoints, a.changed, a.applied.Sub(a.fed))
	if failed != 0 {
		line += fmt.Sprintf(" failed=%d", failed)
	}
	fmt.Fprintln(a.out, line)
}

// apply has the kernel take over a delta, and notes when that was and how much of
// it was new.
func (a *agent) apply(ctx context.Context, d *ruleset.Delta) error {
	err := a.plane.Apply(ctx, d)
	a.metrics.Applied(d, err)
	a.applied, a.changed = time.Now(), 0
	for i := range d.Changes {
		if d.Changes[i].What != 0 {
			a.changed++
		}
	}
	return err
}

// handIn has a source hand in what belongs together, so that it is synced together.
func (a *agent) handIn(what func()) {
	a.mu.Lock()
	defer a.mu.Unlock()
	what()
	a.due, a.fed = true, time.Now()
	a.runner.Trigger() // also if it makes no difference, for the line
}

// followNode keeps up with the node's addresses where no Node object does.
func (a *agent) followNode(ctx context.Context) error {
	tick := time.NewTicker(max(a.cfg.SyncPeriod, time.Second))
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-tick.C:
			a.refreshNode()
		}
	}
}

// watchRules has the rules written anew when somebody else altered them.
func (a *agent) watchRules(ctx context.Context) error {
	var last time.Time
	return a.plane.Watch(ctx, a.mode.watch, func(err error) {
		if err == ruleset.ErrNeedFull {
			return // nothing is known of them, since a sync failed that will be tried again
		}
		if !errors.Is(err, ruleset.ErrNeedFull) {
			a.log.Warn("cannot look whether the rules are as they were left", "error", err)
			return
		}
		a.log.Warn("repairing the rules", "error", err)
		if time.Since(last) < 10*time.Second {
			a.log.Warn("somebody keeps altering the rules: does another agent run in this network namespace?")
		}
		last = time.Now()
		a.rules.Resync()
		a.runner.Trigger()
	})
}

func (a *agent) nodeEvent(warning bool, reason, message string) {
	if a.recorder != nil {
		a.recorder.NodeEvent(warning, reason, message)
	}
}

func (a *agent) serviceCheckFailed(service types.NamespacedName, port uint16, err error) {
	if a.recorder != nil {
		a.recorder.Event(v1.ObjectReference{Kind: "Service", APIVersion: "v1", Namespace: service.Namespace, Name: service.Name, UID: types.UID(service.String())},
			true, reasonServiceCheckFailed, fmt.Sprintf("node %s cannot answer health checks at port %d: %v", a.cfg.NodeName, port, err))
	}
}

// tune sets up connection tracking. What cannot be set is said, and left as it is:
// a node with a small table serves better than one without rules.
func tune(cfg *config.Config, log *slog.Logger) error {
	plan, err := cfg.Tuning.Settings(cpus())
	if err != nil {
		return err
	}
	done, err := conntrack.Tune("", plan)
	for _, d := range done {
		log.Info("set a kernel parameter", "path", "/"+d.Setting.Path, "value", d.Setting.Value, "was", d.Old)
	}
	if all, ok := err.(interface{ Unwrap() []error }); ok {
		for _, err := range all.Unwrap() {
			log.Warn("a kernel parameter is not as it should be", "error", err, "leftAloneWith", leaveAlone(err))
		}
	}
	return err
}

// leaveAlone returns the flag that leaves the parameter of a [conntrack.SettingError]
// as it is.
func leaveAlone(err error) string {
	var s *conntrack.SettingError
	if !errors.As(err, &s) {
		return ""
	}
	for name, flag := range map[string]string{
		"nf_conntrack_max":                     "--conntrack-max-per-core=0",
		"hashsize":                             "--conntrack-max-per-core=0",
		"nf_conntrack_tcp_timeout_established": "--conntrack-tcp-timeout-established=0",
		"nf_conntrack_tcp_timeout_close_wait":  "--conntrack-tcp-timeout-close-wait=0",
		"nf_conntrack_udp_timeout":             "--conntrack-udp-timeout=0",
		"nf_conntrack_udp_timeout_stream":      "--conntrack-udp-timeout-stream=0",
		"nf_conntrack_tcp_be_liberal":          "--conntrack-tcp-be-liberal=false",
	} {
		if path.Base(s.Setting.Path) == name {
			return flag
		}
	}
	return ""
}

// checkForwarding warns if the kernel of the calling thread's namespace does not
// forward packets: that is left to the operator, as kube-proxy's nftables mode
// does. Mode ipvs turns IPv4 forwarding on itself.
func checkForwarding(families []tracker.Family, mode string, log *slog.Logger) {
	for _, f := range families {
		sysctl := "net/ipv4/ip_forward"
		if f == tracker.IPv6 {
			sysctl = "net/ipv6/conf/all/forwarding"
		} else if mode == config.ModeIPVS {
			continue
		}
		value, err := os.ReadFile("/proc/sys/" + sysctl)
		if err == nil && strings.TrimSpace(string(value)) == "0" {
			log.Warn("the kernel does not forward packets, which is needed to reach pods and other nodes from outside", "sysctl", sysctl)
		}
	}
}

// atomicTime is a time that several goroutines set and take.
type atomicTime struct {
	mu sync.Mutex
	t  time.Time
}

func (a *atomicTime) setIfZero(t time.Time) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.t.IsZero() {
		a.t = t
	}
}

// take returns the time and sets it to zero.
func (a *atomicTime) take() time.Time {
	a.mu.Lock()
	defer a.mu.Unlock()
	t := a.t
	a.t = time.Time{}
	return t
}
