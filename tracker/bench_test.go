package tracker_test

import (
	"fmt"
	"runtime"
	"testing"

	v1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"

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

func newSynced(tb testing.TB, c tracker.Config) *tracker.Tracker {
	tb.Helper()
	t := must.Get(tracker.New(c))(tb)
	t.MarkSynced(tracker.KindServices, tracker.KindSlices, tracker.KindNodes)
	return t
}
