package tracker_test

import (
	"fmt"
	"runtime"
	"testing"

	v1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/go-proxier/proxier/internal/testing/must"
	"github.com/go-proxier/proxier/tracker"
)

// world holds the objects of n Services with m endpoints each, in one slice per
// Service.
type world struct {
	services []*v1.Service
	slices   []*discovery.EndpointSlice
}

func (w *world) name() string {
	return fmt.Sprintf("services=%d/endpoints=%d", len(w.services), len(w.slices[0].Endpoints))
}

func newWorld(n, m int) *world {
	w := &world{}
	ep := 0
	for i := range n {
		ns, name := fmt.Sprintf("ns-%d", i%100), fmt.Sprintf("service-%d", i)
		w.services = append(w.services, service(ns, name, fmt.Sprintf("10.96.%d.%d", i>>8, i&255)))
		s := slice(ns, name+"-abcde", name)
		for range m {
			s.Endpoints = append(s.Endpoints, discovery.Endpoint{
				Addresses:  []string{fmt.Sprintf("10.%d.%d.%d", 128+ep>>16, ep>>8&255, ep&255)},
				Conditions: discovery.EndpointConditions{Ready: ptr(true), Serving: ptr(true), Terminating: ptr(false)},
				NodeName:   ptr(fmt.Sprintf("node-%d", ep%1000)),
				Zone:       ptr(fmt.Sprintf("zone-%d", ep%3)),
			})
			ep++
		}
		w.slices = append(w.slices, s)
	}
	return w
}

func (w *world) fill(t *tracker.Tracker) {
	for _, s := range w.services {
		t.SetService(s)
	}
	for _, s := range w.slices {
		t.SetSlice(s)
	}
}

var worldSizes = [][2]int{{1000, 10}, {10000, 10}, {45000, 1}, {5000, 50}}

func eachWorld(b *testing.B, f func(*testing.B, *world)) {
	for _, size := range worldSizes {
		w := newWorld(size[0], size[1])
		b.Run(w.name(), func(b *testing.B) { f(b, w) })
	}
}

// BenchmarkIntake fills an empty tracker and takes the result.
func BenchmarkIntake(b *testing.B) {
	eachWorld(b, func(b *testing.B, w *world) {
		b.ReportAllocs()
		var before, after runtime.MemStats
		runtime.ReadMemStats(&before)
		for b.Loop() {
			t := newSynced(b, tracker.Config{})
			w.fill(t)
			if c := t.Take(); len(c.Updates) != len(w.services) {
				b.Fatal(len(c.Updates))
			}
		}
		runtime.ReadMemStats(&after)
		n := float64(b.N) * float64(len(w.slices)*len(w.slices[0].Endpoints))
		b.ReportMetric(float64(b.Elapsed().Nanoseconds())/n, "ns/endpoint")
		b.ReportMetric(float64(after.TotalAlloc-before.TotalAlloc)/n, "B/endpoint")
		b.ReportMetric(float64(after.Mallocs-before.Mallocs)/n, "allocs/endpoint")
	})
}

// BenchmarkOneSliceChanged makes one endpoint unready and ready again, with a Take
// each time.
func BenchmarkOneSliceChanged(b *testing.B) {
	eachWorld(b, func(b *testing.B, w *world) {
		t := newSynced(b, tracker.Config{})
		w.fill(t)
		t.Take()
		i := len(w.slices) / 2
		states := [2]*discovery.EndpointSlice{w.slices[i].DeepCopy(), w.slices[i]}
		states[0].Endpoints[0].Conditions.Ready = ptr(false)
		runtime.GC()
		b.ReportAllocs()
		n := 0
		for b.Loop() {
			t.SetSlice(states[n&1])
			n++
			if c := t.Take(); len(c.Updates) != 1 {
				b.Fatal(len(c.Updates))
			}
		}
	})
}

// BenchmarkSliceUnchanged sets an unchanged slice.
func BenchmarkSliceUnchanged(b *testing.B) {
	w := newWorld(1000, 10)
	t := newSynced(b, tracker.Config{})
	w.fill(t)
	t.Take()
	b.ReportAllocs()
	for b.Loop() {
		if t.SetSlice(w.slices[500]) {
			b.Fatal("changed")
		}
	}
}

// BenchmarkServiceChanged adds and removes a Service.
func BenchmarkServiceChanged(b *testing.B) {
	eachWorld(b, func(b *testing.B, w *world) {
		t := newSynced(b, tracker.Config{})
		w.fill(t)
		t.Take()
		s := w.services[len(w.services)/2]
		name := types.NamespacedName{Namespace: s.Namespace, Name: s.Name}
		b.ReportAllocs()
		for b.Loop() {
			t.DeleteService(name)
			t.Take()
			t.SetService(s)
			t.Take()
		}
	})
}

// BenchmarkHeap reports the heap of a filled tracker, without the objects that filled
// it.
func BenchmarkHeap(b *testing.B) {
	eachWorld(b, func(b *testing.B, w *world) {
		var held float64
		for b.Loop() {
			before := liveHeap()
			t := newSynced(b, tracker.Config{})
			w.fill(t)
			t.Take()
			held = float64(liveHeap()) - float64(before)
			runtime.KeepAlive(t)
		}
		runtime.KeepAlive(w)
		b.ReportMetric(held/float64(len(w.slices)*len(w.slices[0].Endpoints)), "bytes/endpoint")
		b.ReportMetric(0, "ns/op")
	})
}

func liveHeap() uint64 {
	runtime.GC()
	runtime.GC()
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return m.HeapAlloc
}

// BenchmarkSelect selects from 1,000 endpoints on 100 nodes.
func BenchmarkSelect(b *testing.B) {
	w := newWorld(1, 1000)
	t := newSynced(b, tracker.Config{})
	w.fill(t)
	state := t.Take().Updates[0].Ports[0]
	for _, mode := range []string{"cluster", "local"} {
		p := *state.Port
		p.InternalLocal = mode == "local"
		b.Run(mode, func(b *testing.B) {
			b.ReportAllocs()
			for b.Loop() {
				tracker.Select(&p, state.Endpoints, tracker.NodeInfo{Name: "node-7"})
			}
		})
	}
}

func newSynced(tb testing.TB, c tracker.Config) *tracker.Tracker {
	tb.Helper()
	t := must.Get(tracker.New(c))(tb)
	t.MarkSynced(tracker.KindServices, tracker.KindSlices, tracker.KindNodes)
	return t
}

// BenchmarkOneSliceOfMany changes an endpoint of a very large Service. Its slices
// have 100 endpoints, as the EndpointSlice controller makes them, and their addresses
// interleave.
func BenchmarkOneSliceOfMany(b *testing.B) {
	for _, count := range []int{10, 100} {
		b.Run(fmt.Sprintf("slices=%d/endpoints=100", count), func(b *testing.B) {
			t := newSynced(b, tracker.Config{})
			t.SetService(service("ns", "svc", "10.96.0.1"))
			var states [2]*discovery.EndpointSlice
			for i := range count {
				s := slice("ns", fmt.Sprintf("svc-%03d", i), "svc")
				for j := range 100 {
					with(s, fmt.Sprintf("10.0.%d.%d", j, i))
				}
				t.SetSlice(s)
				states[0] = s
			}
			states[1] = states[0].DeepCopy()
			states[1].Endpoints[50].Conditions.Ready = ptr(false)
			t.Take()
			b.ReportAllocs()
			n := 0
			for b.Loop() {
				n++
				t.SetSlice(states[n&1])
				if c := t.Take(); len(c.Updates) != 1 {
					b.Fatal(len(c.Updates))
				}
			}
		})
	}
}
