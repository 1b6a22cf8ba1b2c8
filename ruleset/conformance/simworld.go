package conformance

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"net/netip"
	"slices"
	"strings"
	"testing"

	v1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/go-proxier/proxier/internal/byname"
	"github.com/go-proxier/proxier/internal/testing/worldgen"
	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/tracker"
)

// errWrite is the error of a failing write.
var errWrite = errors.New("conformance: injected write failure")

// simWorld is a simulated [cluster].
type simWorld struct {
	scene
	o     Simulation
	rng   *rand.Rand
	mode  simMode
	plane Fake

	// The objects of the API server, for a new process.
	objects map[types.NamespacedName]*v1.Service
	slices  map[types.NamespacedName]*discovery.EndpointSlice
	info    tracker.NodeInfo
	cidrs   []netip.Prefix
	inUse   []netip.Prefix

	tracker *tracker.Tracker
	engine  *ruleset.Engine
	cursor  *ruleset.Cursor

	// pending holds the ruleset that the backend last acknowledged, and those offered
	// since.
	pending []*ruleset.Snapshot
	// seen holds every target that ever was a frontend.
	seen map[simTarget]bool
	// failRate is the probability that a write fails. failures counts the failed
	// writes.
	failRate float64
	failures int
	// watched holds the packets checked at each Look, nil before the first Look of a
	// Sync. looked is the first error that a Look found.
	watched []watched
	looked  error
}

// simTarget is the destination of packets. For a NodePort the address is unspecified.
type simTarget struct {
	at    netip.AddrPort
	proto v1.Protocol
}

func newSimWorld(tb testing.TB, o Simulation, c config, rng *rand.Rand) *simWorld {
	tb.Helper()
	w := &simWorld{
		o: o, rng: rng, cidrs: each(o.Families, serviceCIDR), seen: map[simTarget]bool{},
		objects: map[types.NamespacedName]*v1.Service{}, slices: map[types.NamespacedName]*discovery.EndpointSlice{},
	}
	w.scene = newScene(tb, c, o.Families, o.Skip, w.applyOp)
	w.info = w.firstNode()
	w.plane = o.New(tb, SimEnv{Families: o.Families, NodeAddresses: w.allAddresses(), Fail: w.fail, Look: w.look})
	if w.plane.Backend == nil || w.plane.Handle == nil {
		tb.Fatal("conformance: Simulation.New returned a Plane without Backend or Handle")
	}
	w.attach()
	w.pending = []*ruleset.Snapshot{w.engine.Snapshot()}
	return w
}

// allAddresses returns the node's addresses in all families.
func (w *simWorld) allAddresses() (out []netip.Addr) {
	for _, f := range w.ipFamilies {
		out = append(out, w.nodeAddresses(f)...)
	}
	return out
}

// applyOp applies a change.
func (w *simWorld) applyOp(o worldgen.Op) {
	switch {
	case o.SetService != nil:
		w.objects[types.NamespacedName{Namespace: o.SetService.Namespace, Name: o.SetService.Name}] = o.SetService
	case o.SetSlice != nil:
		w.slices[types.NamespacedName{Namespace: o.SetSlice.Namespace, Name: o.SetSlice.Name}] = o.SetSlice
	case o.DeleteService != nil:
		delete(w.objects, *o.DeleteService)
	case o.DeleteSlice != nil:
		delete(w.slices, *o.DeleteSlice)
	case o.SetNode != nil:
		w.info = *o.SetNode
	}
	o.Apply(w.tracker)
}

func (w *simWorld) node() tracker.NodeInfo { return w.tracker.Node() }
func (w *simWorld) resync()                { w.cursor.Resync() }
func (w *simWorld) detach()                { w.cursor.Detach() }

func (w *simWorld) setServiceCIDRs(cidrs, inUse []netip.Prefix) {
	w.cidrs, w.inUse = cidrs, inUse
	w.engine.SetServiceCIDRs(cidrs, inUse)
}

// attach starts a process: a new tracker and engine, all objects in any order, and a
// backend on the data plane in its current state.
func (w *simWorld) attach() {
	w.tb.Helper()
	w.tracker, w.engine = w.start(w.info, nil)
	w.engine.SetServiceCIDRs(w.cidrs, w.inUse)
	names := slices.SortedFunc(maps.Keys(w.objects), byname.Compare)
	if len(names) != 0 {
		w.rng.Shuffle(len(names), func(i, j int) { names[i], names[j] = names[j], names[i] })
	}
	for _, n := range names {
		w.tracker.SetService(w.objects[n])
	}
	for _, n := range slices.SortedFunc(maps.Keys(w.slices), byname.Compare) {
		w.tracker.SetSlice(w.slices[n])
	}
	backend := w.plane.Backend()
	if backend == nil {
		w.tb.Fatal("conformance: Plane.Backend returned no backend")
	}
	w.cursor = w.engine.Attach("conformance", backend)
	w.tracker.MarkSynced(tracker.KindServices, tracker.KindSlices, tracker.KindNodes)
}

func (w *simWorld) Sync() {
	w.tb.Helper()
	if err := w.sync(); err != nil {
		w.tb.Fatal(err)
	}
}

// sync syncs the backend, with failures or restarts depending on the mode, and checks
// the result.
func (w *simWorld) sync() error {
	switch w.mode {
	case failing:
		for range 1 + w.rng.IntN(3) {
			if err := w.attempt([]float64{0.02, 0.1, 0.4}[w.rng.IntN(3)]); err != nil {
				return fmt.Errorf("with failing writes: %w", err)
			}
		}
	case restarting:
		w.detach()
		w.attach()
	}
	return w.attempt(0)
}

// attempt calls Sync once, with the given probability of failing writes.
func (w *simWorld) attempt(failRate float64) error {
	s := w.engine.Snapshot()
	w.pending = append(w.pending, s)
	w.failRate, w.failures, w.watched, w.looked = failRate, 0, nil, nil
	err := w.cursor.Sync(context.Background())
	w.failRate = 0
	switch {
	case w.looked != nil:
		return fmt.Errorf("during Apply: %w", w.looked)
	case err != nil && w.failures == 0:
		return fmt.Errorf("sync failed without a failing write: %w", err)
	case err != nil:
		return nil
	}
	w.pending = []*ruleset.Snapshot{s}
	return w.judge(s)
}

// fail implements SimEnv.Fail.
func (w *simWorld) fail() error {
	if w.failRate == 0 || w.rng.Float64() >= w.failRate {
		return nil
	}
	w.failures++
	return errWrite
}

func (w *simWorld) check(rows ...row) {
	w.tb.Helper()
	w.Sync()
	s := w.engine.Snapshot()
	failed := 0
	for _, r := range rows {
		for _, from := range strings.Fields(r.from) {
			for _, f := range w.ipFamilies {
				if !r.to.at(f).IsValid() {
					continue
				}
				p := w.packet(w.origin(from), r.proto, r.to.at(f))
				v := s.Trace(p)
				err := w.unexpected(v, f, r.want)
				if err == nil {
					err = w.compare(s, p)
				}
				if err != nil && failed < enough {
					failed++
					w.tb.Errorf("%s from %s (%s) to %s (%s): %v", r.proto, from, p.From, r.to.name, p.To, err)
				}
			}
		}
	}
	if failed != 0 {
		w.tb.FailNow()
	}
}

func (w *simWorld) chosen(v1.Protocol, target) map[client]netip.AddrPort {
	w.tb.Helper()
	w.Sync()
	return nil
}

func (w *simWorld) same(string, map[client]netip.AddrPort, map[client]netip.AddrPort) {}

func (w *simWorld) undisturbed(_ []Target, f func()) { f() }

func (w *simWorld) hold([]Target) func() error { return func() error { return nil } }
