package driver_test

import (
	"context"
	"fmt"
	"iter"
	"maps"
	"net/netip"

	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/ruleset/driver"
	"github.com/go-proxier/proxier/tracker"
)

// Flow is the value of a frontend: pools for packets from elsewhere and from this node.
type Flow struct {
	Target, Internal ruleset.Target
	Sizes            [2]int
	Masquerade       ruleset.Masquerade
}

// Maps are the maps of a program in the kernel.
type Maps struct {
	Flows    map[driver.Frontend]Flow
	Backends map[driver.Slot[driver.Pool]]netip.AddrPort
}

// NewPlane returns a backend that writes the maps.
func NewPlane(m Maps) (*driver.Driver, error) {
	slots := &driver.Slots[driver.Pool, netip.AddrPort]{Table: *tableOf("backend", m.Backends)}
	flows := tableOf("flow", m.Flows)
	return driver.New(driver.Plane{
		Limits: ruleset.Limits{Lacks: ruleset.LacksWeights | ruleset.LacksHash | ruleset.LacksSourceRanges},
		Tables: []driver.Ordered{slots, flows},
		Want: func(s *ruleset.Port) {
			sizes := map[ruleset.Target]int{}
			for pool, eps := range driver.Pools(s, false) {
				var addrs []netip.AddrPort
				for _, ep := range eps {
					addrs = append(addrs, ep.Addr)
				}
				sizes[pool.Target] = slots.WantPool(pool, addrs)
			}
			for at, f := range driver.Frontends(s) {
				flows.Want(at, Flow{f.Target, f.Internal, [2]int{sizes[f.Target], sizes[f.Internal]}, f.Masquerade})
			}
		},
	})
}

// tableOf returns a table that is a map, which has the entries of an earlier process.
func tableOf[K comparable, V any](name string, m map[K]V) *driver.Table[K, V] {
	return &driver.Table[K, V]{
		Installed: func(*ruleset.Delta) (iter.Seq2[K, V], error) { return maps.All(m), nil },
		Put:       func(k K, v V) error { m[k] = v; fmt.Println("put", name); return nil },
		Delete:    func(k K) error { delete(m, k); fmt.Println("delete", name); return nil },
	}
}

// A data plane of two maps: a frontend leads to a number of slots, and a slot to an endpoint.
func Example() {
	plane, err := NewPlane(Maps{map[driver.Frontend]Flow{}, map[driver.Slot[driver.Pool]]netip.AddrPort{}})
	if err != nil {
		fmt.Println(err)
		return
	}
	t, err := tracker.New(tracker.Config{})
	if err != nil {
		fmt.Println(err)
		return
	}
	engine, err := ruleset.NewEngine(ruleset.Config{Source: t})
	if err != nil {
		fmt.Println(err)
		return
	}
	cursor := engine.Attach("maps", plane)
	t.MarkSynced(tracker.KindServices, tracker.KindSlices, tracker.KindNodes)
	for _, addresses := range [][]string{{"10.0.0.1", "10.0.0.2"}, {"10.0.0.1", "10.0.0.3"}, {"10.0.0.3"}} {
		fmt.Println(addresses)
		t.SetService(service("web", "10.96.0.1"))
		t.SetSlice(slice("web", addresses...))
		if err := cursor.Sync(context.Background()); err != nil {
			fmt.Println(err)
		}
	}
	// Output:
	// [10.0.0.1 10.0.0.2]
	// put backend
	// put backend
	// put flow
	// [10.0.0.1 10.0.0.3]
	// put backend
	// [10.0.0.3]
	// put backend
	// put flow
	// delete backend
}
