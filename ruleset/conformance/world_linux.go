package conformance

import (
	"cmp"
	"context"
	"fmt"
	"net/netip"
	"slices"
	"testing"
	"time"

	"github.com/go-proxier/proxier/internal/testing/netlab"
	"github.com/go-proxier/proxier/internal/testing/stall"
	"github.com/go-proxier/proxier/internal/testing/testtime"
	"github.com/go-proxier/proxier/internal/testing/worldgen"
	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/tracker"
)

// World is a small cluster around one node, in network namespaces, with a backend.
// The package documentation describes it. Sync and Churn are not safe for concurrent
// use, and Sync must be called by the goroutine of the test.
type World struct {
	// Tracker takes Services and EndpointSlices. It already has the node and is
	// synced. Engine and Cursor connect it to the backend.
	Tracker *tracker.Tracker
	Engine  *ruleset.Engine
	Cursor  *ruleset.Cursor
	// Env is the environment of the backend.
	Env Env

	scene
	options Options
	net     *network
	backend ruleset.Backend
	// made counts the results of the last check's connections.
	made tally
}

// NewWorld makes a World without Services, for tests beyond those of [Run]: pods on
// the node and on another one, and external clients. The CIDRs of the local pods
// determine local traffic, and NodePorts are served at all of the node's addresses.
// Options.Skip has no effect. NewWorld skips the test if namespaces cannot be made.
// The World is removed when the test ends. Retransmissions during a stall of the
// machine are excused, counted and limited as by [Run], but for this World alone.
func NewWorld(tb testing.TB, o Options) *World {
	tb.Helper()
	return newWorld(tb, o, config{})
}

func newWorld(tb testing.TB, o Options, c config) *World {
	tb.Helper()
	families, err := o.validate()
	if err != nil {
		tb.Fatal(err)
	}
	netlab.Require(tb)
	stalls, counts := stall.Start(), new(excuses)
	tb.Cleanup(stalls.Stop)
	stalls.Always = o.stalled
	tb.Cleanup(func() {
		if o.run == nil {
			counts.report(tb)
			return
		}
		tb.Log(counts)
		o.run.add(counts)
	})
	w := &World{options: o}
	w.scene = newScene(tb, c, families, o.Skip, func(o worldgen.Op) { o.Apply(w.Tracker) })
	w.Tracker, w.Engine = w.start(w.firstNode(), each(families, serviceCIDR))
	w.net = newNetwork(&w.scene, stalls, counts)
	w.Env = Env{NetNS: w.net.node.File(), Families: families, do: w.net.node.Do}
	if o.Client != nil {
		for name, h := range w.net.hosts {
			if h.in == "" || slices.Contains(podNames(0), name) {
				h.client = func(f func() error) error { return o.Client(w.Env, f) }
				w.net.hosts[name] = h
			}
		}
	}
	w.attach()
	w.Tracker.MarkSynced(tracker.KindServices, tracker.KindSlices, tracker.KindNodes)
	return w
}

// timeout returns the time to wait for a connection that must be accepted or refused.
func (w *World) timeout() time.Duration { return cmp.Or(w.options.timeout, testtime.Timeout) }

// attach makes a backend and attaches it to the Engine.
func (w *World) attach() {
	w.tb.Helper()
	var backend ruleset.Backend
	if err := w.Do(func() error {
		backend = w.options.New(w.tb, w.Env)
		return nil
	}); err != nil {
		w.tb.Fatal(err)
	}
	if backend == nil {
		w.tb.Fatal("conformance: Options.New returned no backend")
	}
	w.backend = backend
	w.Cursor = w.Engine.Attach("conformance", backend)
}

// Do runs f on a thread in the node's network namespace. Goroutines that f starts run
// outside. Do returns the error of f, or an error if it cannot enter the namespace.
func (w *World) Do(f func() error) error { return w.net.node.Do(f) }

// Sync calls the Cursor's Sync and fails the test on an error.
func (w *World) Sync() {
	w.tb.Helper()
	if err := w.sync(); err != nil {
		w.tb.Fatalf("sync: %v", err)
	}
}

func (w *World) sync() error {
	return w.Do(func() error { return w.Cursor.Sync(context.Background()) })
}

// The methods of [cluster] that scene does not have.

func (w *World) node() tracker.NodeInfo        { return w.Tracker.Node() }
func (w *World) resync()                       { w.Cursor.Resync() }
func (w *World) detach()                       { w.Cursor.Detach() }
func (w *World) hold(to []Target) func() error { return w.Hold(to).Check }

func (w *World) setServiceCIDRs(cidrs, inUse []netip.Prefix) { w.Engine.SetServiceCIDRs(cidrs, inUse) }

// Pod is a server that Services can send to. It serves TCP and UDP at [Pod.Ports].
type Pod struct {
	// Name is the name of the pod, and Node that of its node.
	Name, Node string
	addr       func(tracker.Family) netip.Addr
}

// Addr returns the pod's address.
func (p Pod) Addr(f tracker.Family) netip.Addr { return p.addr(f) }

// Ports returns the two ports of every pod.
func (Pod) Ports() [2]uint16 { return [2]uint16{podPort, podPort2} }

// Pods returns the pods of the world, local ones first.
func (w *World) Pods() []Pod {
	out := make([]Pod, 0, len(w.net.pods))
	for _, p := range w.net.pods {
		out = append(out, p.Pod)
	}
	return out
}

// Reach connects once from an external client and returns the server that responded.
// It returns an error if the connection is refused or gets no reply within the time.
// A UDP connection is one request with its reply, from a new port. Reach is safe for
// concurrent use.
func (w *World) Reach(to Target, wait time.Duration) (netip.AddrPort, error) {
	from := w.net.hosts["client1"]
	o := from.probe(w.tb.Context(), to.Protocol, to.Addr, wait)
	if o.Kind != netlab.Reached {
		return netip.AddrPort{}, fmt.Errorf("%s from %s to %s: %s", to.Protocol, from.name, to.Addr, o)
	}
	return o.Server, nil
}
