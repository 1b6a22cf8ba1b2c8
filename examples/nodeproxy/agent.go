package main

import (
	"context"
	"crypto/rand"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/go-proxier/proxier/conntrack"
	"github.com/go-proxier/proxier/examples/kubeapi"
	"github.com/go-proxier/proxier/examples/metrics"
	"github.com/go-proxier/proxier/examples/nodeproxy/internal/config"
	"github.com/go-proxier/proxier/examples/nodeproxy/internal/takeover"
	"github.com/go-proxier/proxier/examples/socketlb"
	"github.com/go-proxier/proxier/iptables"
	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/runner"
	"github.com/go-proxier/proxier/runner/health"
	"github.com/go-proxier/proxier/tracker"
)

// shutdownTimeout limits how long servers finish their requests after the agent ends.
const shutdownTimeout = 2 * time.Second

// ipvsDeprecation is the warning to operators of mode ipvs: that of kube-proxy, and what holds
// for this agent.
const ipvsDeprecation = "kube-proxy has deprecated its mode ipvs and removes it in Kubernetes 1.43 (KEP-5495); nodeproxy keeps its mode ipvs"

// agent programs a network namespace with the objects of a source. The world has the
// objects and the engine; pipeline.go connects the engine to the kernel; observers.go
// reports; takeover.go removes the rules of other modes.
type agent struct {
	*world
	*observers
	source   source
	mode     mode
	families []tracker.Family
	takeOver *takeOver
	servers  []*server
	// listeners are those of servers that must not fail, by address. They are opened before
	// the kernel's rules change.
	listeners map[string]net.Listener
	closers   []func()
	started   time.Time

	// netns is the network namespace, and instance identifies this process in the answers of
	// its servers.
	netns    *os.File
	instance string

	kernel *kernelSockets
	rules  *ruleset.Cursor
	// followers are synced after the rules are in effect.
	followers []*ruleset.Cursor
	// sockets is nil without --socket-lb, and socketRules is its cursor.
	sockets     *socketlb.Backend
	socketRules *ruleset.Cursor
	// localhost is nil unless this process serves NodePorts at loopback addresses.
	localhost *localhost
	runner    *runner.Runner
	// refresh fires when the node's addresses must be read again.
	refresh *time.Timer
	// mu is held while objects are handed in and while a sync runs, so that objects that
	// are handed in together are synced together.
	mu sync.Mutex
	// upToDate reports that the last sync has brought everything into effect.
	upToDate atomic.Bool
}

// newAgent returns an agent for the network namespace of the calling thread. After it
// returns, only servers need the thread.
func newAgent(ctx context.Context, cfg *config.Config, modes []mode, out io.Writer, log *slog.Logger) (_ *agent, err error) {
	a := &agent{started: time.Now(), refresh: time.NewTimer(0)}
	defer func() {
		if err != nil {
			a.close()
		}
	}()
	if a.mode, err = findMode(modes, cfg.Mode); err != nil {
		return nil, err
	}
	nl, err := netlink.NewHandle(unix.NETLINK_ROUTE)
	if err != nil {
		return nil, fmt.Errorf("cannot open a netlink socket: %w", err)
	}
	a.closers = append(a.closers, nl.Close)
	src, client, err := newSource(cfg, log)
	if err != nil {
		return nil, err
	}
	a.source = src
	a.closers = append(a.closers, src.close)
	if f, ok := src.(*files); ok {
		f.locked = a.handIn
	}

	// Steps that may fail because privileges or kernel features are missing come first.
	if a.families, err = servedFamilies(ctx, a.mode, cfg, hasIPv6(), log); err != nil {
		return nil, err
	}
	if a.observers, err = newObservers(cfg, a.families, out, log); err != nil {
		return nil, err
	}
	if client != nil {
		a.recorder = kubeapi.NewRecorder(client, component, cfg.NodeName)
		a.closers = append(a.closers, a.recorder.Shutdown)
	}
	if err := a.listen(ctx, cfg.Effective); err != nil {
		return nil, err
	}
	if err := a.openKernel(ctx, cfg, log); err != nil {
		return nil, err
	}
	if err := a.openSockets(ctx, cfg, log); err != nil {
		return nil, err
	}
	if cfg.Mode != config.ModeUserspace {
		tune(cfg, log)
		checkForwarding(a.families, cfg.Mode, log)
	}

	hooks := worldHooks{
		own:            func() ([]netip.Addr, error) { return ownAddresses(nl) },
		ownInUse:       func() { a.refresh.Reset(max(cfg.SyncPeriod, time.Second)) },
		receiveService: a.metrics.ReceiveService,
		receiveSlice:   a.metrics.ReceiveSlice,
		eligible:       a.proxy.SetEligible,
		apiServer:      findAPIAddresses(ctx, cfg, log),
		overBudget:     a.metrics.OverBudget,
	}
	if client != nil {
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
	a.instance = rand.Text()
	a.takeOver = newTakeOver(cfg, modes, a.families, a.netns, a.instance, a.boundTo, log)
	a.takeOver.failed = a.metrics.CleanupFailed
	a.takeOver.report = func(k takeover.Kind, s takeover.State) { a.metrics.OtherRules(string(k.Owner), k.Mode, string(s)) }
	a.takeOver.powerless = !takesOverIn(a.kernel.get().plane, cfg.Adopt, log)
	if err := a.connect(); err != nil {
		return nil, err
	}
	if err := a.openLocalhost(log); err != nil {
		return nil, err
	}
	a.servers = a.newServers()
	return a, nil
}

// openKernel opens the data plane and the cleaner of UDP flows.
func (a *agent) openKernel(ctx context.Context, cfg *config.Config, log *slog.Logger) error {
	netns, err := os.Open("/proc/thread-self/ns/net")
	if err != nil {
		return err
	}
	a.netns = netns
	a.closers = append(a.closers, func() { netns.Close() })
	s := settings{Config: cfg, families: a.families, clients: rememberedClients(netns, log), netns: netns, rules: a.metrics.Rules, log: log}
	c := conntrack.Config{NetNS: netns, Log: log, Trace: &conntrack.Trace{FlushedFamily: a.metrics.Flushed}}
	a.kernel = &kernelSockets{
		openPlane: func(ctx context.Context) (dataplane, error) { return a.mode.open(ctx, s) },
		openCleaner: func() (*conntrack.Cleaner, error) {
			if cfg.Mode == config.ModeUserspace {
				return nil, nil // the kernel translates no flow
			}
			return conntrack.New(c)
		},
		log: log,
	}
	if err := a.kernel.open(ctx); err != nil {
		return err
	}
	a.closers = append(a.closers, func() { a.kernel.Close() })
	if _, counts := a.kernel.get().plane.(*iptables.Backend); counts {
		a.metrics.WatchCounters(func() (map[metrics.Counted]uint64, error) {
			return counted(a.kernel.get().plane.(*iptables.Backend))
		})
	}
	if cfg.TrafficMetrics {
		a.watchTraffic()
	}
	return nil
}

// watchTraffic adds the metrics of each Service's traffic.
func (a *agent) watchTraffic() {
	a.metrics.WatchTraffic(metrics.TrafficConfig{
		Read: func(ctx context.Context) (*ruleset.Traffic, error) {
			plane, ok := a.kernel.get().plane.(ruleset.TrafficReader)
			if !ok {
				return &ruleset.Traffic{}, nil
			}
			t, err := plane.Traffic(ctx)
			for _, r := range a.moreTraffic() {
				if err == nil {
					var more *ruleset.Traffic
					if more, err = r.Traffic(ctx); err == nil {
						addTraffic(t, more)
					}
				}
			}
			if err != nil {
				a.log.Warn("cannot read the traffic of Services", "error", err)
			}
			return t, err
		},
		Endpoints: func(k tracker.Key) int {
			if s := a.rules.Service(k); s != nil {
				return len(s.Selection.Reachable)
			}
			return 0
		},
	})
}

// moreTraffic returns what counts the connections that the rules of the mode do not meet.
func (a *agent) moreTraffic() (out []ruleset.TrafficReader) {
	if a.sockets != nil {
		out = append(out, a.sockets)
	}
	if a.localhost != nil {
		out = append(out, a.localhost.plane)
	}
	return out
}

// addTraffic adds the counters of Services in from to those in to.
func addTraffic(to, from *ruleset.Traffic) {
	for k, c := range from.Services {
		sum := to.Services[k]
		sum.Add(c)
		to.Services[k] = sum
	}
}

// close closes everything and leaves the rules in place.
func (a *agent) close() {
	for _, f := range slices.Backward(a.closers) {
		f()
	}
}

// run keeps the kernel in agreement with the source until parent ends or an error occurs
// that cannot be retried. It leaves the rules in place.
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
		a.runRules, a.followSource, a.followNode, a.watchRules, a.watchSockets, a.watchConfig, a.takeOver.run,
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
