package tracker_test

import (
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"runtime"
	"sync/atomic"
	"testing"

	v1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/go-proxier/proxier/tracker"
)

// hookCall is one call of OnServiceEndpoint.
type hookCall struct {
	key  tracker.Key
	addr string
	node string
}

// TestRecomputedEndpointsMatchRebuild changes Nodes, Services and slices at random, with a hook
// that weighs endpoints by a fact of their node. After each Take the results, and those of a View,
// must equal those of a new tracker. The hook must have been called once at most for each
// endpoint, and in Services that did not change only for endpoints on nodes that did.
func TestRecomputedEndpointsMatchRebuild(t *testing.T) {
	recomputed := 0
	for seed := range uint64(150) {
		r := rand.New(rand.NewPCG(seed, 7))
		facts := map[string]int{}
		var calls []hookCall
		config := tracker.Config{OnServiceEndpoint: func(p *tracker.ServicePort, ep *tracker.Endpoint) error {
			calls = append(calls, hookCall{p.Key, ep.Addr.String(), ep.Node})
			switch f := facts[ep.Node]; f {
			case 3:
				return errors.New("no capacity")
			case 2:
				ep.Node = "moved"
			default:
				ep.Weight = uint16(1 + f)
			}
			return nil
		}}
		tr := newSynced(t, config)
		view := tracker.NewFanout(tr).View(tracker.NodeInfo{})
		services, all := map[types.NamespacedName]*v1.Service{}, map[types.NamespacedName]*discovery.EndpointSlice{}
		fill := func(tr *tracker.Tracker) map[types.NamespacedName]tracker.Update {
			for _, s := range services {
				tr.SetService(s)
			}
			for _, es := range all {
				tr.SetSlice(es)
			}
			out := map[types.NamespacedName]tracker.Update{}
			for _, u := range tr.Take().Updates {
				out[u.Name] = u
			}
			return out
		}
		text := func(u tracker.Update) string {
			out := ""
			for _, p := range u.Ports {
				out += fmt.Sprint("\n", p.Port.Key, p.Port)
				for _, e := range p.Endpoints {
					out += fmt.Sprintf(" %+v", *e)
				}
			}
			return out
		}
		got := map[types.NamespacedName]tracker.Update{}
		touched, changed := map[types.NamespacedName]bool{}, map[string]bool{}
		for step := range 80 {
			name := named(fmt.Sprint("svc-", r.IntN(3)))
			es := named(fmt.Sprint("slice-", r.IntN(4)))
			touch := func() {
				if s := all[es]; s != nil {
					touched[named(s.Labels[discovery.LabelServiceName])] = true
				}
			}
			switch r.IntN(8) {
			case 0:
				touched[name] = true
				delete(services, name)
				tr.DeleteService(name)
			case 1, 2:
				touched[name] = true
				services[name] = randomService(r, name)
				tr.SetService(services[name])
			case 3:
				touch()
				delete(all, es)
				tr.DeleteSlice(es)
			case 4, 5:
				touch()
				all[es] = randomSlice(r, es)
				touch()
				tr.SetSlice(all[es])
			case 6: // several, of which some have no endpoint
				var nodes []string
				for _, i := range r.Perm(4)[:1+r.IntN(3)] {
					n := fmt.Sprint("node-", i)
					facts[n], changed[n] = r.IntN(4), true
					nodes = append(nodes, n)
				}
				tr.Recompute(nodes...)
			case 7:
				if r.IntN(4) > 0 {
					break
				}
				for i := range 4 {
					n := fmt.Sprint("node-", i)
					facts[n], changed[n] = r.IntN(4), true
				}
				tr.RecomputeAll()
			}
			if r.IntN(3) == 0 {
				continue
			}
			where := fmt.Sprintf("seed %d step %d", seed, step)
			calls = nil
			for _, u := range view.Take().Updates {
				if !touched[u.Name] && text(u) == text(got[u.Name]) {
					t.Fatalf("%s: %v is returned and is as before", where, u.Name)
				}
				checkKept(t, got[u.Name], u)
				if got[u.Name] = u; len(u.Ports) == 0 {
					delete(got, u.Name)
				}
			}
			seen := map[hookCall]bool{}
			for _, c := range calls {
				if seen[c] {
					t.Fatalf("%s: the hook was called twice for %v", where, c)
				}
				seen[c] = true
				if !touched[c.key.NamespacedName] {
					if recomputed++; !changed[c.node] {
						t.Fatalf("%s: the hook was called for %v, where nothing changed", where, c)
					}
				}
			}
			clear(touched)
			clear(changed)
			want := fill(newSynced(t, config))
			if !maps.EqualFunc(got, want, func(a, b tracker.Update) bool { return text(a) == text(b) }) {
				t.Fatalf("%s: got %v\nwant %v", where, got, want)
			}

			// Recompute knows which nodes have endpoints.
			on := map[string]bool{}
			for _, u := range fill(newSynced(t, tracker.Config{})) {
				for _, p := range u.Ports {
					for _, e := range p.Endpoints {
						on[e.Node] = true
					}
				}
			}
			for i := range 4 {
				n := fmt.Sprint("node-", i)
				if got := tr.Recompute(n); got != on[n] {
					t.Fatalf("%s: Recompute(%s) is %t", where, n, got)
				}
				changed[n] = true
			}
			if got := tr.RecomputeAll(); got != (len(on) > 0) {
				t.Fatalf("%s: RecomputeAll is %t", where, got)
			}
			if r.IntN(2) == 0 { // nothing differs
				if u := view.Take().Updates; len(u) > 0 {
					t.Fatalf("%s: %v are returned after a change of nothing", where, u)
				}
				clear(changed)
			}
		}
	}
	if recomputed < 1000 {
		t.Fatalf("the hook was called again %d times, too few for this test", recomputed)
	}
}

// TestRecomputeCallsHookForTheNodeAlone counts the calls of the hook and the Updates when one node
// of many changes, and when all do.
func TestRecomputeCallsHookForTheNodeAlone(t *testing.T) {
	calls, weight := 0, uint16(1)
	tr := newSynced(t, tracker.Config{OnServiceEndpoint: func(_ *tracker.ServicePort, e *tracker.Endpoint) error {
		calls++
		e.Weight = weight
		return nil
	}})
	newWorld(1000, 10).fill(tr) // 10 endpoints on each of 1,000 nodes
	tr.Take()
	step := func(what string, wantCalls, wantUpdates int) {
		t.Helper()
		calls = 0
		if n := len(tr.Take().Updates); n != wantUpdates || calls != wantCalls {
			t.Errorf("%s: %d calls and %d Updates, want %d and %d", what, calls, n, wantCalls, wantUpdates)
		}
	}
	notified := 0
	tr.Notify(func() { notified++ })
	weight = 2
	tr.Recompute("node-7")
	tr.Recompute("node-7")
	step("a node", 10, 10)
	tr.Recompute("node-7")
	step("a node without a difference", 10, 0)
	if tr.Recompute("unknown"); notified != 3 {
		t.Errorf("notified %d times, want 3", notified)
	}
	step("an unknown node", 0, 0)
	for i := range 1000 {
		tr.Recompute(fmt.Sprint("node-", i))
	}
	step("every node", 10_000, 1000)
	weight = 1
	tr.RecomputeAll()
	step("all", 10_000, 1000)
}

// TestRecomputeWithoutHook has no results to compute again.
func TestRecomputeWithoutHook(t *testing.T) {
	tr := newSynced(t, tracker.Config{})
	newWorld(1, 1).fill(tr)
	tr.Take()
	if tr.Recompute("node-0") || tr.RecomputeAll() || len(tr.Take().Updates) > 0 {
		t.Error("something changed")
	}
}

// TestConcurrentRecomputeLosesNothing changes a fact and calls Recompute while another goroutine
// takes the changes. The last fact must reach the endpoint.
func TestConcurrentRecomputeLosesNothing(t *testing.T) {
	var weight atomic.Int64
	tr := newSynced(t, tracker.Config{OnServiceEndpoint: func(_ *tracker.ServicePort, e *tracker.Endpoint) error {
		e.Weight = uint16(weight.Load())
		return nil
	}})
	newWorld(1, 1).fill(tr)
	const last = 5000
	done := make(chan struct{})
	go func() {
		defer close(done)
		for i := range last {
			weight.Store(int64(i + 1))
			tr.Recompute("node-0")
		}
	}()
	var got uint16
	take := func() {
		for _, u := range tr.Take().Updates {
			got = u.Ports[0].Endpoints[0].Weight
		}
	}
	for running := true; running; take() {
		select {
		case <-done:
			running = false
		default:
		}
	}
	if got != last {
		t.Errorf("the endpoint has the weight %d, want %d", got, last)
	}
}

// BenchmarkRecompute changes the weights of the 100 endpoints on one node of 1,000, which are
// in 100 of 10,000 Services. It reports the memory of the index as well.
func BenchmarkRecompute(b *testing.B) {
	weight := uint16(1)
	tr := newSynced(b, tracker.Config{OnServiceEndpoint: func(_ *tracker.ServicePort, e *tracker.Endpoint) error {
		if e.Node == "node-7" {
			e.Weight = weight
		}
		return nil
	}})
	newWorld(10_000, 10).fill(tr)
	tr.Take()
	heap := func() float64 {
		var m runtime.MemStats
		runtime.GC()
		runtime.ReadMemStats(&m)
		return float64(m.HeapAlloc)
	}
	before := heap()
	tr.Recompute("node-7") // creates the index
	index := heap() - before
	tr.Take()
	b.ReportAllocs()
	for b.Loop() {
		weight = 3 - weight
		tr.Recompute("node-7")
		if n := len(tr.Take().Updates); n != 100 {
			b.Fatal(n)
		}
	}
	b.ReportMetric(index/100_000, "index-B/endpoint")
}
