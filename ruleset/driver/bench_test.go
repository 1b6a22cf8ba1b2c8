package driver_test

import (
	"context"
	"fmt"
	"testing"

	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/ruleset/driver"
	"github.com/go-proxier/proxier/tracker"
)

// counted is a data plane that only counts calls. Apply is timed.
type counted struct {
	b     *testing.B
	calls int
	ruleset.Backend
}

func (c *counted) Apply(ctx context.Context, d *ruleset.Delta) error {
	c.b.StartTimer()
	defer c.b.StopTimer()
	return c.Backend.Apply(ctx, d)
}

func countedTable[K comparable, V any](c *counted) driver.Table[K, V] {
	return driver.Table[K, V]{
		Put:       func(K, V) error { c.calls++; return nil },
		PutAll:    func([]K, []V) error { c.calls++; return nil },
		Delete:    func(K) error { c.calls++; return nil },
		DeleteAll: func([]K) error { c.calls++; return nil },
	}
}

// benchmark replaces one endpoint of a Service with n, or removes the Service. The figures are
// those of Apply alone. The data plane has shared endpoints with a value, and pools in slots.
func benchmark(b *testing.B, n int, change func(w *world, i int)) {
	c := &counted{b: b}
	slots := &driver.Slots[driver.Pool, driver.Endpoint]{
		Entries: countedTable[driver.Slot[driver.Pool], driver.Endpoint](c),
		Value: func(p driver.Pool, ep *tracker.Endpoint) driver.Endpoint {
			return driver.Endpoint{Addr: ep.Addr, Protocol: p.Service.Protocol}
		},
	}
	d, err := driver.New(driver.Tables[string, []*tracker.Endpoint, int]{
		Endpoints: countedTable[driver.Endpoint, string](c),
		Endpoint:  func(_ *ruleset.Port, ep *tracker.Endpoint) string { return ep.Zone },
		Pools:     slots.Pools(), Pool: (*ruleset.Port).Pool,
		Frontends: countedTable[driver.Frontend, int](c),
		Frontend: func(s *ruleset.Port, f *ruleset.Frontend) int {
			return slots.Len(driver.Pool{Service: s.Key, Target: f.Target})
		},
	})
	if err != nil {
		b.Fatal(err)
	}
	c.Backend = d
	w := &world{}
	if w.tracker, err = tracker.New(tracker.Config{}); err != nil {
		b.Fatal(err)
	}
	e, err := ruleset.NewEngine(ruleset.Config{Source: w.tracker})
	if err != nil {
		b.Fatal(err)
	}
	w.cursor = e.Attach("counted", c)
	w.tracker.MarkSynced(tracker.KindServices, tracker.KindSlices, tracker.KindNodes)
	calls := 0
	b.ReportAllocs()
	b.StopTimer()
	w.set(n, false)
	if err := w.cursor.Sync(b.Context()); err != nil {
		b.Fatal(err)
	}
	b.ResetTimer()
	b.StopTimer()
	for i := range b.N {
		change(w, i)
		c.calls = 0
		if err := w.cursor.Sync(b.Context()); err != nil {
			b.Fatal(err)
		}
		calls += c.calls
	}
	b.ReportMetric(float64(calls)/float64(b.N), "calls/op")
}

// set gives Service web n endpoints. other replaces one of them by another address.
func (w *world) set(n int, other bool) {
	s := slice("web")
	for i := range n {
		at := 2 * i
		if other && i == n/3 {
			at = 2*(2*n/3) + 1
		}
		s.Endpoints = append(s.Endpoints, slice("", fmt.Sprintf("10.0.%d.%d", at>>8, at&255)).Endpoints...)
	}
	w.tracker.SetService(service("web", "10.96.0.1"))
	w.tracker.SetSlice(s)
}

func BenchmarkReplacedEndpoint(b *testing.B) {
	for _, n := range []int{10, 1000} {
		b.Run(fmt.Sprint("of=", n), func(b *testing.B) {
			benchmark(b, n, func(w *world, i int) { w.set(n, i%2 == 0) })
		})
	}
}

// BenchmarkAddedAndDeletedService deletes and adds a Service of 1,000 endpoints in turn.
func BenchmarkAddedAndDeletedService(b *testing.B) {
	benchmark(b, 1000, func(w *world, i int) {
		if i%2 == 0 {
			w.tracker.DeleteService(name("web"))
		} else {
			w.set(1000, false)
		}
	})
}
