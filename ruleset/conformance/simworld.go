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

	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/ruleset/conformance/worldgen"
	"github.com/go-proxier/proxier/tracker"
)

// errWrite is the error of a failing write.
var errWrite = errors.New("conformance: injected write failure")

// simWorld is a simulated [cluster].
type simWorld struct {
	tb     testing.TB
	o      Simulation
	config config
	rng    *rand.Rand
	mode   simMode
	plane  Plane
	pods   []string

	// The objects of the API server, for a new process.
	services map[types.NamespacedName]*v1.Service
	slices   map[types.NamespacedName]*discovery.EndpointSlice
	info     tracker.NodeInfo
	cidrs    []netip.Prefix
	// scripted holds the services last passed to set.
	scripted map[string]*service

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
	if c.remotePods == 0 {
		c.remotePods = defaultRemotePods
	}
	w := &simWorld{
		tb: tb, o: o, config: c, rng: rng, pods: podNames(c.remotePods),
		services: map[types.NamespacedName]*v1.Service{}, slices: map[types.NamespacedName]*discovery.EndpointSlice{},
		info:     tracker.NodeInfo{Name: nodeName, Zone: zone, Addresses: each(o.Families, primary)},
		cidrs:    each(o.Families, serviceCIDR),
		scripted: map[string]*service{}, seen: map[simTarget]bool{},
	}
	w.plane = o.New(tb, SimEnv{Families: o.Families, Fail: w.fail, Look: w.look})
	if w.plane.Backend == nil || w.plane.Handle == nil {
		tb.Fatal("conformance: Simulation.New returned a Plane without Backend or Handle")
	}
	w.attach()
	w.pending = []*ruleset.Snapshot{w.engine.Snapshot()}
	return w
}

// apply applies a change.
func (w *simWorld) apply(o worldgen.Op) {
	switch {
	case o.SetService != nil:
		w.services[types.NamespacedName{Namespace: o.SetService.Namespace, Name: o.SetService.Name}] = o.SetService
	case o.SetSlice != nil:
		w.slices[types.NamespacedName{Namespace: o.SetSlice.Namespace, Name: o.SetSlice.Name}] = o.SetSlice
	case o.DeleteService != nil:
		delete(w.services, *o.DeleteService)
	case o.DeleteSlice != nil:
		delete(w.slices, *o.DeleteSlice)
	case o.SetNode != nil:
		w.info = *o.SetNode
	}
	o.Apply(w.tracker)
}

func (w *simWorld) set(services ...service) {
	for _, s := range services {
		c := s.complete()
		w.scripted[c.name] = c
		w.apply(worldgen.Op{SetService: c.object(w.o.Families)})
		for _, f := range w.o.Families {
			w.apply(worldgen.Op{SetSlice: c.slice(f)})
		}
	}
}

func (w *simWorld) change(name string, edit func(*service)) {
	s := *w.scripted[name]
	edit(&s)
	w.set(s)
}

func (w *simWorld) remove(name string) {
	delete(w.scripted, name)
	w.apply(worldgen.Op{DeleteService: &types.NamespacedName{Namespace: namespace, Name: name}})
	for _, f := range w.o.Families {
		w.apply(worldgen.Op{DeleteSlice: &types.NamespacedName{Namespace: namespace, Name: sliceName(name, f)}})
	}
}

func (w *simWorld) node() tracker.NodeInfo     { return w.tracker.Node() }
func (w *simWorld) setNode(n tracker.NodeInfo) { w.apply(worldgen.Op{SetNode: &n}) }

func (w *simWorld) setServiceCIDRs(cidrs []netip.Prefix) {
	w.cidrs = cidrs
	w.engine.SetServiceCIDRs(cidrs)
}

func (w *simWorld) families() []tracker.Family { return w.o.Families }
func (w *simWorld) resync()                    { w.cursor.Resync() }
func (w *simWorld) detach()                    { w.cursor.Detach() }

// attach starts a process: a new tracker and engine, all objects in any order, and a
// backend on the data plane in its current state.
func (w *simWorld) attach() {
	w.tb.Helper()
	must := func(err error) {
		w.tb.Helper()
		if err != nil {
			w.tb.Fatal(err)
		}
	}
	var err error
	w.tracker, err = tracker.New(tracker.Config{
		Node: w.info, Families: w.o.Families, OnService: worldgen.OnService, OnEndpoint: worldgen.OnEndpoint,
	})
	must(err)
	local := w.config.localTraffic
	if local == nil {
		local = &ruleset.LocalTraffic{CIDRs: each(w.o.Families, localPodCIDR)}
	}
	addresses, err := ruleset.ParseNodePortAddresses(w.config.nodePortAddresses)
	must(err)
	w.engine, err = ruleset.NewEngine(ruleset.Config{
		Tracker: w.tracker, MasqueradeAll: w.config.masqueradeAll, LocalTraffic: *local,
		NodePortAddresses: addresses, ServiceCIDRs: w.cidrs, HashSeed: hashSeed,
	})
	must(err)
	names := slices.SortedFunc(maps.Keys(w.services), compareNames)
	if len(names) != 0 {
		w.rng.Shuffle(len(names), func(i, j int) { names[i], names[j] = names[j], names[i] })
	}
	for _, n := range names {
		w.tracker.SetService(w.services[n])
	}
	for _, n := range slices.SortedFunc(maps.Keys(w.slices), compareNames) {
		w.tracker.SetSlice(w.slices[n])
	}
	backend := w.plane.Backend()
	if backend == nil {
		w.tb.Fatal("conformance: Plane.Backend returned no backend")
	}
	w.cursor = w.engine.Attach("conformance", backend)
	w.tracker.MarkSynced(tracker.Services, tracker.Slices, tracker.Nodes)
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

func (w *simWorld) does(f Feature) bool {
	_, skipped := w.o.Skip[f]
	return !skipped
}

func (w *simWorld) check(rows ...row) {
	w.tb.Helper()
	s := w.engine.Snapshot()
	failed := 0
	for _, r := range rows {
		for _, from := range strings.Fields(r.from) {
			for _, f := range w.o.Families {
				p := w.packet(w.host(from), r.proto, r.to.at(f))
				v := s.Trace(p)
				err := w.compare(v, p)
				if got := describe(v, func(a netip.Addr) string { return w.podAt(f, a) }); got != sortWords(r.want) {
					err = fmt.Errorf("the verdict of Trace is %q (%s), but the world expects %q: one of them is wrong", got, v.Rule, r.want)
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

func (w *simWorld) checkFor(f Feature, rows ...row) {
	w.tb.Helper()
	if w.does(f) {
		w.check(rows...)
	}
}

func (w *simWorld) chosen(v1.Protocol, target) map[client]netip.AddrPort { return nil }

func (w *simWorld) same(string, map[client]netip.AddrPort, map[client]netip.AddrPort) {}

func (w *simWorld) undisturbed(_ []Target, f func()) { f() }

func (w *simWorld) hold([]Target) func() error { return func() error { return nil } }

func (w *simWorld) errorf(format string, args ...any) {
	w.tb.Helper()
	w.tb.Errorf(format, args...)
}

// packet returns a packet from a host.
func (w *simWorld) packet(from simHost, proto v1.Protocol, to netip.AddrPort) ruleset.Packet {
	f := tracker.FamilyOf(to.Addr())
	return ruleset.Packet{From: from.addr(f), InInterface: from.in, Protocol: proto, To: to, NodeAddresses: w.nodeAddresses(f)}
}
