// Package core keeps the kernel in agreement with the objects. Package agent exports it.
package core

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"runtime/debug"
	"slices"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	v1 "k8s.io/api/core/v1"

	"github.com/go-proxier/proxier/conntrack"
	"github.com/go-proxier/proxier/examples/internal/node/config"
	"github.com/go-proxier/proxier/examples/internal/node/modes"
	"github.com/go-proxier/proxier/examples/internal/node/objects"
	"github.com/go-proxier/proxier/examples/kubeapi"
	"github.com/go-proxier/proxier/examples/metrics"
	"github.com/go-proxier/proxier/examples/reset"
	"github.com/go-proxier/proxier/internal/complaint"
	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/ruleset/dataplane"
	"github.com/go-proxier/proxier/runner"
	"github.com/go-proxier/proxier/runner/health"
	"github.com/go-proxier/proxier/tracker"
)

// shutdownTimeout limits how long servers finish their requests after the agent ends.
const shutdownTimeout = 2 * time.Second

// ipvsDeprecation is the warning to operators of mode ipvs: that of kube-proxy, and what holds
// for this agent.
const ipvsDeprecation = "kube-proxy has deprecated its mode ipvs and removes it in Kubernetes 1.43 (KEP-5495); nodeproxy keeps its mode ipvs"

// Agent programs a network namespace with the objects of a source. The world has the
// objects and the engine; pipeline.go connects the engine to the kernel; observers.go
// reports; takeover.go removes the rules of other modes.
type Agent struct {
	*objects.World
	*observers
	options  Options
	source   objects.Source
	mode     modes.Mode
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
	// nodeIPs holds the node's addresses at the start, if the mode needs them.
	nodeIPs []netip.Addr

	plane modes.Plane
	// cleaner deletes stale UDP flows. It is nil if the system has no connection tracking.
	cleaner *conntrack.Cleaner
	// resetter ends connections to endpoints that vanished, or is nil.
	resetter *reset.Resetter
	rules    *ruleset.Cursor
	// followers are synced after the rules are in effect.
	followers []*ruleset.Cursor
	// Sockets is nil without --socket-lb, and socketRules is its cursor.
	Sockets     SocketPlane
	socketRules *ruleset.Cursor
	// taint is nil without --remove-startup-taint.
	taint *startupTaint
	// localhost is nil unless this process serves NodePorts at loopback addresses.
	localhost *localhost
	runner    *runner.Runner
	// refresh fires when the node's addresses must be read again.
	refresh *time.Timer
	// mu is held while a sync runs.
	mu sync.Mutex
	// upToDate reports that the last sync has brought everything into effect. failures is the number
	// of failed syncs since one did, failedAt the end of the last, and drift the last error since then
	// of a watch that found rules altered, or nil. mu protects all of them.
	upToDate     bool
	everInEffect bool
	failures     int
	failedAt     time.Time
	drift        error
	// repaired gets a value when rules are in effect for the first time, or after they were altered.
	repaired chan struct{}
	// retry triggers a sync.
	retry *time.Timer
}

// New returns an agent. It changes nothing. Close or Run must be called.
func New(ctx context.Context, o Options) (*Agent, error) {
	a := &Agent{started: time.Now(), repaired: make(chan struct{}, 1), refresh: time.NewTimer(0), options: o}
	if err := o.Within(func() error { return a.open(ctx) }); err != nil {
		a.Close()
		return nil, err
	}
	return a, nil
}

// open opens what can fail, in the network namespace of the agent.
func (a *Agent) open(ctx context.Context) (err error) {
	a.closers = append(a.closers, func() { a.refresh.Stop() })
	cfg, log := a.options.Config, a.options.Log
	if a.mode, err = modes.Find(a.options.Modes, cfg.Mode); err != nil {
		return err
	}
	own, ranges, stopReading, err := objects.OpenAddresses()
	if err != nil {
		return err
	}
	a.closers = append(a.closers, stopReading)
	src, client := a.options.Source, a.options.Client
	if src == nil {
		if src, client, err = objects.NewSource(cfg, client, log); err != nil {
			return err
		}
	}
	a.source = src
	a.closers = append(a.closers, src.Close)
	if f, ok := src.(*objects.Files); ok {
		f.Together = a.handIn
	}

	var node *v1.Node
	if a.mode.NeedsNode {
		if node, err = src.Node(ctx, objects.NeedOf(cfg)); err != nil {
			return err
		}
		if a.nodeIPs = objects.NodeInfo(cfg, node).Addresses; len(a.nodeIPs) == 0 {
			if a.nodeIPs, err = own(); err != nil {
				return err
			}
		}
	}
	// Steps that may fail because privileges or kernel features are missing come first.
	if a.families, err = modes.ServedFamilies(ctx, a.mode, modes.Settings{Config: cfg, NodeIPs: a.nodeIPs}, log); err != nil {
		return err
	}
	if a.observers, err = newObservers(&a.options, a.families); err != nil {
		return err
	}
	switch {
	case a.options.Events != nil:
		a.events = &guardedEvents{EventSink: a.options.Events, log: log}
	case client != nil:
		r := kubeapi.NewRecorder(client.Core(), a.options.Component, cfg.NodeName, log)
		a.closers = append(a.closers, r.Shutdown)
		a.events = r
	}
	if err := a.listen(ctx, cfg); err != nil {
		return err
	}
	if err := a.openKernel(ctx, cfg, log); err != nil {
		return err
	}
	if err := a.openSockets(ctx, cfg, log); err != nil {
		return err
	}
	hooks := objects.WorldHooks{
		Own:    own,
		Ranges: ranges,
		OwnInUse: func(err error) {
			wait := time.Second
			if err == nil {
				wait = max(wait, cfg.SyncPeriod)
			}
			a.refresh.Reset(wait)
		},
		OnService:      a.mode.OnService,
		ReceiveService: a.metrics.ReceiveService,
		ReceiveSlice:   a.metrics.ReceiveSlice,
		Ineligible:     a.Proxy.SetIneligible,
		Contact:        a.metrics.Contact,
		APIServer:      objects.FindAPIAddresses(ctx, client, log),
		OverBudget:     a.metrics.OverBudget,
		LeftOut:        a.metrics.LeftOut,
	}
	hooks.Overlap = func(message string) { a.nodeEvent(true, reasonServiceCIDROverlap, message) }
	if a.events != nil {
		hooks.Events = a.events
	}
	if client != nil && cfg.StartupTaint != "" {
		a.taint = &startupTaint{key: cfg.StartupTaint, remove: client.RemoveTaint, event: a.nodeEvent, log: log, wake: make(chan struct{}, 1)}
		hooks.Node = a.taint.observe
	}
	if !a.mode.NeedsNode {
		if node, err = src.Node(ctx, objects.NeedOf(cfg)); err != nil {
			return err
		}
	}
	if cfg.Manifests == "" || a.options.Source != nil || node != nil {
		// With an API server /healthz waits for the Node object, as kube-proxy's does.
		a.Proxy.SetIneligible(health.WhyIneligible(node))
	}
	hooks.Panicked = func(p any) { a.Failed(panicError(p)) }
	if a.World, err = objects.New(cfg, a.families, node, hooks, log); err != nil {
		return err
	}
	a.instance = rand.Text()
	a.takeOver = newTakeOver(a)
	if a.plane.Powerless && cfg.Adopt {
		log.Warn("--adopt-from-kube-proxy has no effect without CAP_NET_ADMIN")
	}
	if err := a.connect(); err != nil {
		return err
	}
	if err := a.openLocalhost(log); err != nil {
		return err
	}
	if a.options.Serve {
		a.servers = a.newServers()
	}
	return a.register()
}

// openKernel opens the data plane and the cleaner of UDP flows.
func (a *Agent) openKernel(ctx context.Context, cfg *config.Config, log *slog.Logger) error {
	netns, err := openNetNS()
	if err != nil {
		return err
	}
	a.netns = netns
	a.closers = append(a.closers, func() { netns.Close() })
	s := modes.Settings{Config: cfg, Families: a.families, NodeIPs: a.nodeIPs, Clients: rememberedClients(netns, log), NetNS: netns, Limits: a.limits, Dial: a.options.dialTo(), Rules: a.metrics.Rules, LoadBalancerFailed: a.metrics.LoadBalancerFailed, LimitExceeded: a.limitExceeded, Log: log}
	c := conntrack.Config{NetNS: netns, Log: log, Hooks: &conntrack.Hooks{FlushedFamily: a.metrics.Flushed}}
	if a.plane, err = a.mode.Open(ctx, s); err != nil {
		return err
	}
	a.closers = append(a.closers, func() { a.plane.Close() })
	if a.mode.TracksConnections {
		a.cleaner, err = conntrack.New(ctx, c)
		if err == nil {
			a.closers = append(a.closers, func() { a.cleaner.Close() })
		} else if err = optional("cannot delete stale UDP flows", err, log); err != nil {
			return err
		}
	}
	if cfg.ResetVanished != 0 {
		if err := a.openResetter(ctx, cfg, log); err != nil {
			return err
		}
	}
	if a.plane.Counters != nil {
		a.metrics.WatchCounters(a.plane.Counters)
	}
	if cfg.TrafficMetrics {
		a.watchTraffic()
	}
	return nil
}

// optional logs an error about what the system lacks, which the agent does without, and returns any
// other. It may pass, so that the next start has the feature.
func optional(message string, err error, log *slog.Logger) error {
	if !errors.Is(err, dataplane.ErrUnsupported) {
		return err
	}
	log.Warn(message, "error", err)
	return nil
}

// limitExceeded sends an Event about a limit of the data plane that a Service exceeds, as package
// ruleset does for those that it knows.
func (a *Agent) limitExceeded(k tracker.Key, limit string) {
	a.Tracker.Event(k.NamespacedName, true, tracker.ReasonLimitExceeded,
		fmt.Sprintf("port %q (%s): backend %s: %s", complaint.Value(k.Port), k.Family, a.Config.Mode, limit))
}

// watchTraffic adds the metrics of each Service's traffic.
func (a *Agent) watchTraffic() {
	a.metrics.WatchTraffic(metrics.TrafficConfig{
		Read: func(ctx context.Context) (*dataplane.Traffic, error) {
			t, err := a.plane.Traffic(ctx)
			for _, r := range a.moreTraffic() {
				if err == nil {
					var more *dataplane.Traffic
					if more, err = r.Traffic(ctx); err == nil {
						modes.AddTraffic(t, more)
					}
				}
			}
			if err != nil {
				a.Log.Warn("cannot read the traffic of Services", "error", err)
			}
			return t, err
		},
		All: func() (out []tracker.Key) {
			for _, s := range a.Engine.Snapshot().Ports {
				out = append(out, s.Key)
			}
			return out
		},
		Endpoints: func(k tracker.Key) int {
			if s := a.rules.Port(k); s != nil {
				return len(s.Selection.Reachable)
			}
			return 0
		},
	})
}

// moreTraffic returns what counts the connections that the rules of the mode do not meet.
func (a *Agent) moreTraffic() (out []dataplane.TrafficReader) {
	if a.Sockets != nil {
		out = append(out, a.Sockets)
	}
	if a.localhost != nil {
		out = append(out, a.localhost.plane)
	}
	return out
}

// Close closes everything and leaves the rules in place.
func (a *Agent) Close() {
	for _, f := range slices.Backward(a.closers) {
		func() {
			defer recovered(func(err error) { a.options.Log.Error("cannot close", "error", err) }) // of a Backend, or a Registerer
			f()
		}()
	}
	a.closers = nil
}

// register adds the metrics to the program's registry. All of them exist by now.
func (a *Agent) register() error {
	if a.options.Registerer == nil {
		return nil
	}
	to := prometheus.WrapRegistererWith(a.options.Labels, a.options.Registerer)
	if err := to.Register(a.metrics.Registry()); err != nil {
		return fmt.Errorf("cannot register metrics: %w", err)
	}
	a.closers = append(a.closers, func() { to.Unregister(a.metrics.Registry()) })
	return nil
}

// InEffect is closed when the rules are in effect for the first time.
func (a *Agent) InEffect() <-chan struct{} { return a.takeOver.inEffect }

// Health returns the health of the agent.
func (a *Agent) Health() *health.Proxy { return a.Proxy }

// ErrPanic is wrapped by the error of Run about a goroutine of the agent that panicked.
var ErrPanic = errors.New("panic")

// recovered calls failed with the panic of the calling goroutine, if there is one. It must be deferred.
func recovered(failed func(error)) {
	if p := recover(); p != nil {
		failed(panicError(p))
	}
}

// guardedEvents is an EventSink of a program. The agent goes on after a panic in it.
type guardedEvents struct {
	tracker.EventSink
	log  *slog.Logger
	once sync.Once
}

func (g *guardedEvents) Event(ref v1.ObjectReference, warning bool, reason, message string) {
	defer recovered(func(err error) {
		g.once.Do(func() {
			g.log.Error("the program's sink of Events panicked; further panics are not logged", "error", err)
		})
	})
	g.EventSink.Event(ref, warning, reason, message)
}

func panicError(p any) error { return fmt.Errorf("%w: %v\n%s", ErrPanic, p, debug.Stack()) }

// Run keeps the kernel in agreement with the source until parent ends or an error occurs
// that cannot be retried. It leaves the rules in place.
func (a *Agent) Run(parent context.Context) error {
	defer a.Close()
	ctx, stop := context.WithCancelCause(parent)
	defer stop(nil)
	a.Failed = func(err error) { stop(err) }
	if err := a.tuneKernel(); err != nil {
		return err
	}
	a.logStart()
	a.nodeEvent(false, ReasonStarting, "")
	if a.Config.Mode == config.ModeIPVS && !a.options.Foreign {
		a.Log.Warn(ipvsDeprecation)
		a.nodeEvent(true, reasonIPVSDeprecation, ipvsDeprecation)
	}
	// What a loop opens is in its thread's namespace.
	inNetNS := a.options.loopWithin
	loops := []func(context.Context) error{
		inNetNS(a.runRules), a.followSource, inNetNS(a.followNode), inNetNS(a.watchRules), a.watchConfig, inNetNS(a.takeOver.run), a.cleanFlows, a.endUnanswered, a.removeTaint,
	}
	if !a.options.Foreign {
		loops = append(loops, inNetNS(a.watchSockets), inNetNS(a.resetConnections))
	}
	for _, s := range a.servers {
		loops = append(loops, s.run)
	}
	var wg sync.WaitGroup
	for _, f := range loops {
		wg.Go(func() {
			defer recovered(a.Failed)
			if err := f(ctx); err != nil {
				stop(err)
			}
		})
	}
	wg.Wait()
	down, cancel := context.WithTimeout(context.Background(), shutdownTimeout)
	defer cancel()
	a.ports.Close(down)
	if cause := context.Cause(ctx); parent.Err() == nil || errors.Is(cause, ErrPanic) {
		return cause
	}
	return nil
}

// tuneKernel sets the parameters of connection tracking, if the options ask for it, and warns of others. They
// are those of the namespace that New was called in.
func (a *Agent) tuneKernel() error {
	if !a.mode.TracksConnections {
		return nil
	}
	set := func() error {
		if a.options.Tune {
			_ = Tune(a.Config, a.Log)
		}
		checkForwarding(a.families, a.Config.Mode, a.Log)
		if a.Config.DetectLocal.Bridge != "" {
			checkBridge(a.families, a.Log)
		}
		return nil
	}
	if a.netns == nil { // not Linux
		return set()
	}
	return doIn(a.netns, set)
}

// Explain returns what must happen to a packet, and what the kernel does with it, or nil if the mode has
// no rules in the kernel.
func (a *Agent) Explain(ctx context.Context, p ruleset.Packet) (v ruleset.Verdict, found *dataplane.Found, err error) {
	snapshot := a.Engine.Snapshot()
	if p.NodeAddresses == nil {
		p.NodeAddresses = a.Tracker.Node().Addresses
	}
	v = snapshot.Trace(p)
	if a.mode.Lookup == nil {
		return v, nil, nil
	}
	q := dataplane.Query{Packet: p}
	if f := v.Frontend; f != nil {
		q.NodePort = f.Kind == ruleset.KindNodePort
		q.Internal = f.ShortCircuit() && (p.InInterface == "" || snapshot.Node.LocalTraffic.Recognizes(p.From, p.InInterface))
	}
	err = a.options.Within(func() error {
		got, err := a.mode.Lookup(ctx, q)
		found = &got
		return err
	})
	return v, found, err
}
