package driver_test

import (
	"context"
	"fmt"
	"testing"

	"github.com/go-proxier/proxier/internal/testing/must"
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

func countedTable[K comparable, V comparable](c *counted) *driver.Table[K, V] {
	return &driver.Table[K, V]{
		Put:       func(K, V) error { c.calls++; return nil },
		PutAll:    func([]K, []V) error { c.calls++; return nil },
		Delete:    func(K) error { c.calls++; return nil },
		DeleteAll: func([]K) error { c.calls++; return nil },
		Equal:     func(a, b V) bool { return a == b },
	}
}

// newCounted returns a data plane that has shared endpoints with a value, and pools in slots.
func newCounted(b *testing.B) *counted {
	c := &counted{b: b}
	endpoints, frontends := countedTable[driver.Endpoint, string](c), countedTable[driver.Frontend, int](c)
	slots := &driver.Slots[driver.Pool, driver.Endpoint]{Table: *countedTable[driver.Slot[driver.Pool], driver.Endpoint](c)}
	var pool []driver.Endpoint
	d, err := driver.New(driver.Plane{
		Tables: []driver.Ordered{endpoints, slots, frontends},
		Want: func(s *ruleset.Port) {
			for k, eps := range driver.Pools(s, false) {
				pool = pool[:0]
				for _, ep := range eps {
					endpoints.Want(driver.EndpointOf(s, ep), ep.Zone)
					pool = append(pool, driver.EndpointOf(s, ep))
				}
				slots.WantPool(k, pool)
			}
			for at, f := range driver.Frontends(s) {
				frontends.Want(at, len(s.Pool(f.Target)))
			}
		},
	})
	if err != nil {
		b.Fatal(err)
	}
	c.Backend = d
	return c
}

// benchmark replaces one endpoint of a Service with n, or removes the Service. The figures are
// those of Apply alone.
func benchmark(b *testing.B, n int, change func(w *world, i int)) {
	c := newCounted(b)
	var err error
	w := &world{}
	if w.tracker, err = tracker.New(tracker.Config{}); err != nil {
		b.Fatal(err)
	}
	e := must.Get(ruleset.NewEngine(ruleset.Config{Source: w.tracker}))(b)
	w.cursor = e.Attach("counted", c)
	w.tracker.MarkSynced(tracker.KindServices, tracker.KindSlices, tracker.KindNodes)
	calls := 0
	b.ReportAllocs()
	b.StopTimer()
	w.fill(n, false)
	must.Do(b, w.cursor.Sync(b.Context()))
	b.ResetTimer()
	b.StopTimer()
	for i := range b.N {
		change(w, i)
		c.calls = 0
		must.Do(b, w.cursor.Sync(b.Context()))
		calls += c.calls
	}
	b.ReportMetric(float64(calls)/float64(b.N), "calls/op")
}

// fill gives Service web n endpoints. other replaces one of them by another address.
func (w *world) fill(n int, other bool) {
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
			benchmark(b, n, func(w *world, i int) { w.fill(n, i%2 == 0) })
		})
	}
}

// BenchmarkAddedAndDeletedService deletes and adds a Service of 1,000 endpoints in turn.
func BenchmarkAddedAndDeletedService(b *testing.B) {
	benchmark(b, 1000, func(w *world, i int) {
		if i%2 == 0 {
			w.tracker.DeleteService(name("web"))
		} else {
			w.fill(1000, false)
		}
	})
}
