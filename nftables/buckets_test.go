//go:build linux

package nftables

import (
	"math/rand/v2"
	"net/netip"
	"slices"
	"testing"

	v1 "k8s.io/api/core/v1"

	"github.com/go-proxier/proxier/internal/netlab"
	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/ruleset/conformance/worldgen"
	"github.com/go-proxier/proxier/ruleset/maglev"
	"github.com/go-proxier/proxier/tracker"
)

// TestDistributedPoolAgreesWithModel changes pools at random, between all distributions, and
// applies the resulting changes to a model of the kernel's map.
func TestDistributedPoolAgreesWithModel(t *testing.T) {
	for seed, sticky := range []bool{false, true} {
		rng := rand.New(rand.NewPCG(9, uint64(seed)))
		p := &pool{number: 3, sticky: sticky}
		var c poolChange
		var list []*tracker.Endpoint
		kernel := map[int]netip.AddrPort{}
		members := map[uint16]netip.AddrPort{}
		for step := range 3000 {
			next := slices.Clone(list)
			for range rng.IntN(3) {
				if len(next) > 0 && rng.IntN(2) == 0 {
					next = slices.Delete(next, 0, 1)
				} else if a := netip.AddrPortFrom(netip.AddrFrom4([4]byte{10, 0, 0, byte(rng.IntN(40))}), 80); !slices.ContainsFunc(next, func(ep *tracker.Endpoint) bool { return ep.Addr == a }) {
					next = append(next, &tracker.Endpoint{Addr: a, Weight: 1})
				}
			}
			if len(next) > 0 && rng.IntN(3) == 0 {
				i := rng.IntN(len(next))
				next[i] = &tracker.Endpoint{Addr: next[i].Addr, Weight: uint16(1 + rng.IntN(9))}
			}
			how := []distribution{{}, {weighted: true}, {size: 251}, {size: 509}}[rng.IntN(4)]
			if rng.IntN(3) != 0 {
				how = p.distribution
			}
			if len(next) == 0 {
				how = distribution{}
			}
			var tab *maglev.Table
			p.set(list, next, how, func() *maglev.Table {
				members := make([]maglev.Member, len(next))
				for i, ep := range next {
					members[i] = maglev.Member{Addr: ep.Addr, Weight: ep.Weight}
				}
				tab = maglev.Build(1, how.size, members)
				return tab
			}, &c)
			list = next
			for _, n := range c.gone {
				delete(members, n)
			}
			for _, m := range c.come {
				members[m.number] = m.addr
			}
			addr := p.addresses()
			for _, bucket := range c.buckets {
				if _, ok := kernel[bucket]; ok != (bucket < c.before) {
					t.Fatalf("step %d: bucket %d is there: %t", step, bucket, ok)
				}
				delete(kernel, bucket)
				if bucket < p.size() {
					kernel[bucket] = addr(bucket)
				}
			}
			if len(kernel) != p.size() {
				t.Fatalf("step %d: %d buckets, want %d", step, len(kernel), p.size())
			}
			has := map[netip.AddrPort]int{}
			for bucket := range p.size() {
				if kernel[bucket] != addr(bucket) {
					t.Fatalf("step %d: bucket %d has %s, not %s", step, bucket, kernel[bucket], addr(bucket))
				}
				has[kernel[bucket]]++
				if sticky && members[p.member(bucket)] != kernel[bucket] {
					t.Fatalf("step %d: number %d is of %s, not %s", step, p.member(bucket), members[p.member(bucket)], kernel[bucket])
				}
				if tab != nil && next[tab.At(bucket)].Addr != kernel[bucket] {
					t.Fatalf("step %d: bucket %d of the table has %s", step, bucket, kernel[bucket])
				}
			}
			for i, ep := range next {
				want := 1
				switch {
				case how.size != 0:
					continue
				case how.weighted:
					want = ruleset.Shares(next)[i]
				}
				if has[ep.Addr] != want {
					t.Fatalf("step %d, %+v: %s has %d buckets, want %d", step, how, ep, has[ep.Addr], want)
				}
			}
		}
	}
}

// TestChangeOfWeightOrHashWritesFewElements counts the elements that a change of a weighted or a
// hashed Service writes. Only buckets that change are written.
func TestChangeOfWeightOrHashWritesFewElements(t *testing.T) {
	t.Parallel()
	r := newRig(t, netlab.NewHost(t))
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
		before := r.backend.writer.written
		change()
		r.sync()
		if n := r.backend.writer.written - before; n > most || n == 0 {
			t.Errorf("%s took %d elements, at most %d wanted", what, n, most)
		} else {
			t.Logf("%s took %d elements", what, n)
		}
		r.verify()
	}
	weights := map[string]int{"10.244.0.1": 2, "10.244.0.2": 3}
	set(0, nil, upTo(10)...)
	set(1, weights, upTo(10)...)
	set(2, nil, upTo(10)...)
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
	count("an endpoint of 10 removed from a hashed Service", 2*moved, func() { set(0, nil, upTo(9)...) })
	count("an endpoint added to 9 of a hashed Service", 2*moved, func() { set(0, nil, upTo(10)...) })
	// A bucket, the dispatch key and the chain for one bucket more.
	count("a weight raised by one", 8, func() {
		weights["10.244.0.2"] = 4
		set(1, weights, upTo(10)...)
	})
	count("a weight lowered by one", 8, func() {
		weights["10.244.0.2"] = 3
		set(1, weights, upTo(10)...)
	})
}
