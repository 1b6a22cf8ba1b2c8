package nftables

import (
	"maps"
	"net/netip"
	"slices"
	"strings"
	"testing"

	v1 "k8s.io/api/core/v1"

	"github.com/go-proxier/proxier/internal/testing/backendtest"
	"github.com/go-proxier/proxier/internal/testing/worldgen"
	"github.com/go-proxier/proxier/nftables/internal/layout"
	"github.com/go-proxier/proxier/ruleset/maglev"
	"github.com/go-proxier/proxier/tracker"
)

// TestChangeWritesFewElements counts the elements of a transaction, beside few and many other
// Services.
func TestChangeWritesFewElements(t *testing.T) {
	t.Parallel()
	r := newMemoryRig(t)
	for _, services := range []int{1, 200} {
		for i := range services {
			r.tracker.SetService(svc(i))
			r.tracker.SetSlice(epSlice(i, tracker.IPv4, backendtest.UpTo(40)...))
		}
		r.sync()
		count := func(what string, want int, change func()) {
			t.Helper()
			before := r.memory.Written
			change()
			r.sync()
			if n := r.memory.Written - before; n != want {
				t.Errorf("%d services: %s took %d elements, want %d", services, what, n, want)
			}
		}
		generation := r.memory.Generation
		count("nothing", 0, func() {
			for i := range services { // as an informer does after it has lost its connection
				slice := epSlice(i, tracker.IPv4, backendtest.UpTo(40)...)
				slice.ResourceVersion = "2"
				r.tracker.SetService(svc(i, func(s *v1.Service) { s.ResourceVersion = "2" }))
				r.tracker.SetSlice(slice)
			}
		})
		if r.memory.Generation != generation {
			t.Error("a transaction without a change")
		}
		replaced := backendtest.UpTo(40)
		replaced[6] = 101 // on another node, as 7 was
		count("an endpoint replaced", 2, func() { r.tracker.SetSlice(epSlice(0, tracker.IPv4, replaced...)) })
		// The last bucket moves into the hole. The number of buckets to draw from stays.
		count("an endpoint removed", 3, func() {
			r.tracker.SetSlice(epSlice(0, tracker.IPv4, slices.DeleteFunc(slices.Clone(replaced), func(e int) bool { return e == 3 })...))
		})
		count("an endpoint added", 1, func() { r.tracker.SetSlice(epSlice(0, tracker.IPv4, replaced...)) })
		r.verify()
		for i := range services {
			r.tracker.DeleteService(backendtest.ServiceName(i))
		}
		r.sync()
		r.verify()
	}
}

// TestChangeOfWeightOrHashWritesFewElements counts the elements that a change of a weighted or a
// hashed Service writes. Only buckets that change are written.
func TestChangeOfWeightOrHashWritesFewElements(t *testing.T) {
	t.Parallel()
	r := newMemoryRig(t)
	hashed := func(s *v1.Service) { worldgen.SetHash(s, tracker.HashSourcePort) }
	r.tracker.SetService(svc(0, hashed))
	r.tracker.SetService(svc(1))
	r.tracker.SetService(svc(2, hashed))
	set := func(i int, weights map[string]int, eps ...int) {
		es := epSlice(i, tracker.IPv4, eps...)
		for a, w := range weights {
			worldgen.SetWeight(es, a, w)
		}
		r.tracker.SetSlice(es)
	}
	count := func(what string, most int, change func()) {
		t.Helper()
		before := r.memory.Written
		change()
		r.sync()
		if n := r.memory.Written - before; n > most || n == 0 {
			t.Errorf("%s took %d elements, at most %d wanted", what, n, most)
		} else {
			t.Logf("%s took %d elements", what, n)
		}
		r.verify()
	}
	weights := map[string]int{"10.244.0.1": 2, "10.244.0.2": 3}
	set(0, nil, backendtest.UpTo(10)...)
	set(1, weights, backendtest.UpTo(10)...)
	set(2, nil, backendtest.UpTo(10)...)
	r.sync()
	r.verify()
	// Each bucket that changes is deleted and added. No other Service and no dispatch key is
	// written.
	moved := func(a, b int) int {
		n, tables := 0, [2][]netip.Addr{}
		for i, eps := range []int{a, b} {
			members := make([]maglev.Member, eps)
			for j := range members {
				members[j] = maglev.Member{Addr: netip.AddrPortFrom(netip.AddrFrom4([4]byte{10, 244, 0, byte(j + 1)}), 8080), Weight: 1}
			}
			t := maglev.Build(0, maglev.SizeFor(eps), members)
			for bucket := range t.Len() {
				tables[i] = append(tables[i], members[t.At(bucket)].Addr.Addr())
			}
		}
		for bucket := range tables[0] {
			if tables[0][bucket] != tables[1][bucket] {
				n++
			}
		}
		return n
	}(10, 9)
	if moved > 509/10+509/20 {
		t.Errorf("%d of 509 buckets change hands", moved)
	}
	count("an endpoint of 10 removed from a hashed Service", 2*moved, func() { set(0, nil, backendtest.UpTo(9)...) })
	count("an endpoint added to 9 of a hashed Service", 2*moved, func() { set(0, nil, backendtest.UpTo(10)...) })
	// A bucket, the dispatch key and the chain for one bucket more.
	count("a weight raised by one", 8, func() {
		weights["10.244.0.2"] = 4
		set(1, weights, backendtest.UpTo(10)...)
	})
	count("a weight lowered by one", 8, func() {
		weights["10.244.0.2"] = 3
		set(1, weights, backendtest.UpTo(10)...)
	})
}

// TestSmallPoolsNeedNoNewChain gives a Service each number of endpoints up to layout.ExactBuckets. No
// change may add a chain that looks up endpoints, because the kernel would walk through the map of
// all endpoints.
func TestSmallPoolsNeedNoNewChain(t *testing.T) {
	t.Parallel()
	r := newMemoryRig(t)
	r.tracker.SetService(svc(1))
	r.tracker.SetSlice(epSlice(1, tracker.IPv4, 1, 2))
	r.sync()
	ipv4 := r.backend.tables.Table(tracker.IPv4)
	pools := func() map[string]bool {
		out := map[string]bool{}
		for name := range ipv4.Chains.Objects() {
			if strings.HasPrefix(name, "pool-") {
				out[name] = true
			}
		}
		return out
	}
	before := pools()
	if len(before) != layout.ExactBuckets {
		t.Errorf("%d chains for pools at first, want %d", len(before), layout.ExactBuckets)
	}
	for n := 1; n <= layout.ExactBuckets; n++ {
		r.tracker.SetSlice(epSlice(1, tracker.IPv4, upTo(n)...))
		r.sync()
		if now := pools(); !maps.Equal(now, before) {
			t.Fatalf("%d endpoints: chains %v, before %v", n, now, before)
		}
	}
	r.verify()
	if r.backend.tables.Table(tracker.IPv4) != ipv4 {
		t.Error("the change was a full delta")
	}
}
