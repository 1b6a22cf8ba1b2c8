// Package core keeps the kernel in agreement with the objects. Package agent exports it.
package core

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"os"
	"runtime/debug"
	"sync"
	"time"

	v1 "k8s.io/api/core/v1"

	"github.com/go-proxier/proxier/conntrack"
	"github.com/go-proxier/proxier/examples/internal/node/config"
	"github.com/go-proxier/proxier/examples/internal/node/modes"
	"github.com/go-proxier/proxier/examples/internal/node/objects"
	"github.com/go-proxier/proxier/examples/internal/node/takeover"
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

// Agent programs a network namespace with the objects of a source. parts.go lists its parts.
type Agent struct {
	*objects.World
	*observers
	options  Options
	list     []part
	started  time.Time
	source   objects.Source
	client   *kubeapi.Client // nil without an API server
	mode     modes.Mode
	families []tracker.Family
	takeOver *takeOver
	// inEffect is closed when the rules are in effect for the first time.
	inEffect chan struct{}

	// netns is the network namespace, and instance identifies this process in the answers of
	// its servers.
	netns    *os.File
	instance string
	// own reads the node's addresses, and ranges those to which its network leads. node is the Node at the
	// start, or nil, and nodeIPs holds its addresses, if the mode needs them.
	own     func() ([]netip.Addr, error)
	ranges  func() (objects.Ranges, error)
	node    *v1.Node
	nodeIPs []netip.Addr

	plane modes.Plane
	// clients reads, once, the clients that kube-proxy remembers. The agent's own memory, if there is any, is in the
	// table that the agent keeps.
	clients func() takeover.Clients
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
	a := &Agent{
		started: time.Now(), instance: rand.Text(), repaired: make(chan struct{}, 1), refresh: time.NewTimer(0), options: o,
		inEffect: make(chan struct{}),
	}
	if err := o.Within(func() error { return a.open(ctx) }); err != nil {
		a.Close()
		return nil, err
	}
	return a, nil
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
		Read: func(ctx context.Context) (sum *dataplane.Traffic, err error) {
			readers := []dataplane.TrafficReader{a.plane}
			if a.Sockets != nil {
				readers = append(readers, a.Sockets)
			}
			if a.localhost != nil {
				readers = append(readers, a.localhost.plane)
			}
			for i, r := range readers {
				t, err := r.Traffic(ctx)
				if err != nil {
					a.Log.Warn("cannot read the traffic of Services", "error", err)
					return nil, err
				}
				if i == 0 {
					sum = t
				} else { // connections that the rules of the mode do not meet
					modes.AddTraffic(sum, t)
				}
			}
			return sum, nil
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

// InEffect is closed when the rules are in effect for the first time.
func (a *Agent) InEffect() <-chan struct{} { return a.inEffect }

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
	var wg sync.WaitGroup
	for i := range a.list {
		p := &a.list[i]
		if p.run == nil {
			continue
		}
		wg.Go(func() {
			defer recovered(a.Failed)
			if err := a.loop(ctx, p); err != nil {
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
		got, err := a.mode.LookupOne(ctx, q)
		found = &got
		return err
	})
	return v, found, err
}
