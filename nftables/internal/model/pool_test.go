package model

import (
	"math/rand/v2"
	"net/netip"
	"slices"
	"testing"

	"github.com/go-proxier/proxier/nftables/internal/layout"
	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/tracker"
)

// TestPoolAgreesWithModel applies random lists of endpoints to a pool, and the pool's changes to a
// map, which stands for the kernel's.
func TestPoolAgreesWithModel(t *testing.T) {
	for seed, sticky := range []bool{false, true} {
		rng := rand.New(rand.NewPCG(1, uint64(seed)))
		p := &pool{number: 7, sticky: sticky}
		kernel := map[int]netip.AddrPort{}
		members := map[uint16]netip.AddrPort{}
		numberOf := map[netip.AddrPort]uint16{}
		var list []*tracker.Endpoint
		var c poolChange
		for round := range 3000 {
			next := slices.Clone(list)
			for range rng.IntN(4) {
				switch {
				case len(next) > 0 && rng.IntN(2) == 0:
					i := rng.IntN(len(next))
					next = slices.Delete(next, i, i+1)
				case len(next) < 40:
					a := netip.AddrPortFrom(netip.AddrFrom4([4]byte{10, 0, 0, byte(rng.IntN(60))}), 80)
					if !slices.ContainsFunc(next, func(ep *tracker.Endpoint) bool { return ep.Addr == a }) {
						next = append(next, &tracker.Endpoint{Addr: a})
					}
				}
			}
			if len(next) > 0 && rng.IntN(3) == 0 {
				// A new pointer to the same endpoint is not a change.
				i := rng.IntN(len(next))
				next[i] = &tracker.Endpoint{Addr: next[i].Addr, Serving: true}
			}
			slices.SortFunc(next, func(a, b *tracker.Endpoint) int { return a.Addr.Compare(b.Addr) })
			p.set(list, next, distribution{}, nil, &c)

			come, gone := difference(list, next)
			if limit := 2 * (come + gone); len(c.buckets) > limit {
				t.Fatalf("round %d: %d buckets changed for %d endpoints come and %d gone", round, len(c.buckets), come, gone)
			}
			for _, bucket := range c.buckets {
				if _, was := kernel[bucket]; was != (bucket < c.before) {
					t.Fatalf("round %d: bucket %d in use before: %t", round, bucket, was)
				}
				delete(kernel, bucket)
				if bucket < len(p.buckets) {
					kernel[bucket] = p.buckets[bucket].Addr
				}
			}
			if len(kernel) != len(next) {
				t.Fatalf("round %d: %d buckets for %d endpoints", round, len(kernel), len(next))
			}
			for i := range next {
				if a, ok := kernel[i]; !ok || !slices.ContainsFunc(next, func(ep *tracker.Endpoint) bool { return ep.Addr == a }) {
					t.Fatalf("round %d: bucket %d has %v", round, i, a)
				}
			}
			for i, ep := range p.buckets {
				if !slices.Contains(next, ep) {
					t.Fatalf("round %d: bucket %d keeps an old value", round, i)
				}
			}
			for _, n := range c.gone {
				if _, ok := members[n]; !ok {
					t.Fatalf("round %d: number %d is gone but never came", round, n)
				}
				delete(members, n)
			}
			for _, m := range c.come {
				if _, ok := members[m.number]; ok || m.number == 0 {
					t.Fatalf("round %d: number %d came twice", round, m.number)
				}
				members[m.number] = m.addr
			}
			if sticky {
				if len(members) != len(next) {
					t.Fatalf("round %d: %d numbers for %d endpoints", round, len(members), len(next))
				}
				now := map[netip.AddrPort]uint16{}
				for i, ep := range p.buckets {
					now[ep.Addr] = p.members[i]
					if members[p.members[i]] != ep.Addr {
						t.Fatalf("round %d: number of bucket %d is another endpoint's", round, i)
					}
				}
				for a, n := range numberOf {
					if m, ok := now[a]; ok && m != n {
						t.Fatalf("round %d: %v changed its number", round, a)
					}
				}
				numberOf = now
			}
			list = next
		}
	}
}

func difference(old, list []*tracker.Endpoint) (come, gone int) {
	has := func(in []*tracker.Endpoint, a netip.AddrPort) bool {
		return slices.ContainsFunc(in, func(ep *tracker.Endpoint) bool { return ep.Addr == a })
	}
	for _, ep := range list {
		if !has(old, ep.Addr) {
			come++
		}
	}
	for _, ep := range old {
		if !has(list, ep.Addr) {
			gone++
		}
	}
	return come, gone
}

// TestMemberNumbersWrapAround gives a sticky pool more endpoints over time than there are numbers.
func TestMemberNumbersWrapAround(t *testing.T) {
	p := &pool{sticky: true}
	stays := &tracker.Endpoint{Addr: netip.MustParseAddrPort("10.0.0.1:80")}
	var c poolChange
	list := []*tracker.Endpoint{stays}
	p.set(nil, list, distribution{}, nil, &c)
	for i := range 1 << 17 {
		next := []*tracker.Endpoint{stays, {Addr: netip.AddrPortFrom(netip.AddrFrom4([4]byte{10, 1, byte(i >> 8), byte(i)}), 80)}}
		p.set(list, next, distribution{}, nil, &c)
		list = next
		if p.members[0] != 1 || p.members[1] == 1 || p.members[1] == 0 {
			t.Fatalf("change %d: numbers %v", i, p.members)
		}
	}
}

// TestAdoptedNumbersStay fills pools whose endpoints had numbers before a restart, including the
// last number.
func TestAdoptedNumbersStay(t *testing.T) {
	rng := rand.New(rand.NewPCG(5, 5))
	addr := func(i int) netip.AddrPort {
		return netip.AddrPortFrom(netip.AddrFrom4([4]byte{10, byte(i >> 16), byte(i >> 8), byte(i)}), 80)
	}
	for round := range 200 {
		had, now := 1+rng.IntN(40), 1+rng.IntN(60)
		if round == 0 {
			had, now = 40000, layout.MaxStickyEndpoints // more than there are unused numbers for
		}
		p := &pool{sticky: true, adopted: map[netip.AddrPort]uint16{}}
		gone := map[uint16]bool{}
		for i := range had {
			n := uint16(layout.MaxStickyEndpoints - i) // 65535 and below
			if round%2 == 1 {
				n = uint16(1 + i)
			}
			p.adopted[addr(i)] = n
			gone[n] = true
		}
		old := p.adopted
		first := rng.IntN(had + 1)
		var list []*tracker.Endpoint
		for _, i := range rng.Perm(now) {
			list = append(list, &tracker.Endpoint{Addr: addr(first + i)})
			delete(gone, old[addr(first+i)])
		}
		var c poolChange
		p.set(nil, list, distribution{}, nil, &c)
		seen := map[uint16]bool{}
		for _, m := range c.come {
			if n, ok := old[m.addr]; ok && n != m.number {
				t.Fatalf("round %d: %v had number %d and has %d", round, m.addr, n, m.number)
			}
			if m.number == 0 || seen[m.number] {
				t.Fatalf("round %d: number %d is given out twice", round, m.number)
			}
			if round != 0 && gone[m.number] {
				t.Fatalf("round %d: number %d is of an endpoint that is gone", round, m.number)
			}
			seen[m.number] = true
		}
		if len(seen) != now {
			t.Fatalf("round %d: %d numbers for %d endpoints", round, len(seen), now)
		}
		// The numbers of later endpoints must not clash either.
		next := append(slices.Clone(list[1:]), &tracker.Endpoint{Addr: addr(1 << 20)})
		p.set(list, next, distribution{}, nil, &c)
		count := map[uint16]int{}
		for _, n := range p.members {
			if count[n]++; count[n] > 1 {
				t.Fatalf("round %d: number %d is two endpoints'", round, n)
			}
		}
	}
}

// TestAdoptedPoolNumbersStay takes numbers for pools beside those of an earlier process.
func TestAdoptedPoolNumbersStay(t *testing.T) {
	tab := NewTable(tracker.IPv4, &ruleset.Node{}, DefaultConfig, nil, 0)
	had := map[StickyOwner]*AdoptedPool{"a": {number: layout.StickyMark | 1}, "b": {number: layout.StickyMark | layout.MaxSticky}, "c": {number: layout.StickyMark | 700}}
	tab.Pools.Adopt(&Adopted{Pools: had})
	seen := map[uint32]bool{1: true, layout.MaxSticky: true, 700: true}
	for range layout.MaxSticky - len(had) {
		n, ok := tab.Pools.sticky.allocateNumber()
		if !ok || n == 0 || n > layout.MaxSticky || seen[n] {
			t.Fatalf("number %d, %t", n, ok)
		}
		seen[n] = true
	}
	if n, ok := tab.Pools.sticky.allocateNumber(); ok {
		t.Fatalf("allocateNumber returned %d of an exhausted range", n)
	}
	tab.Pools.ReleaseAdopted()
	for range had {
		if n, ok := tab.Pools.sticky.allocateNumber(); !ok || n != 1 && n != layout.MaxSticky && n != 700 {
			t.Fatalf("number %d, %t", n, ok)
		}
	}
}

func TestNumbersAreReusedLate(t *testing.T) {
	n := numbers{max: 4}
	for want := uint32(1); want <= 4; want++ {
		got, ok := n.allocateNumber()
		if !ok || got != want {
			t.Fatalf("allocateNumber returned %d, %t; want %d", got, ok, want)
		}
		if want == 2 {
			n.releaseNumber(2)
			n.releaseNumber(1)
		}
	}
	for _, want := range []uint32{2, 1} {
		if got, ok := n.allocateNumber(); !ok || got != want {
			t.Fatalf("allocateNumber returned %d, %t; want %d", got, ok, want)
		}
	}
	if got, ok := n.allocateNumber(); ok {
		t.Fatalf("allocateNumber returned %d of an exhausted range", got)
	}
}

func TestBucketsAreNearlyFull(t *testing.T) {
	for n := 1; n <= 100000; n++ {
		buckets := layout.BucketsFor(n)
		below := layout.BucketsBelow(buckets)
		switch {
		case buckets < n:
			t.Fatalf("%d endpoints get %d buckets", n, buckets)
		case n > layout.ExactBuckets && buckets*4 > n*5:
			t.Fatalf("%d endpoints get %d buckets: more than a fifth empty", n, buckets)
		case below >= n:
			t.Fatalf("%d endpoints: layout.BucketsBelow returned %d", n, below)
		case below > 0 && layout.BucketsFor(below) != below:
			t.Fatalf("%d is not a number of buckets", below)
		}
	}
}

// TestFullPoolFindsNumbers replaces endpoints of a pool that has as many as there are numbers, one
// half at a time.
func TestFullPoolFindsNumbers(t *testing.T) {
	endpoints := make([]*tracker.Endpoint, 2*layout.MaxStickyEndpoints)
	for i := range endpoints {
		endpoints[i] = &tracker.Endpoint{Addr: netip.AddrPortFrom(netip.AddrFrom4([4]byte{10, byte(i >> 16), byte(i >> 8), byte(i)}), 80)}
	}
	p := &pool{sticky: true}
	var c poolChange
	var list []*tracker.Endpoint
	for first := 0; first <= layout.MaxStickyEndpoints; first += layout.MaxStickyEndpoints / 2 {
		next := endpoints[first:][:layout.MaxStickyEndpoints]
		p.set(list, next, distribution{}, nil, &c)
		list = next
		var seen memberSet
		for bucket, n := range p.members {
			if n == 0 || seen.has(n) {
				t.Fatalf("from %d: bucket %d has the number %d", first, bucket, n)
			}
			seen.add(n)
		}
	}
	if p.taken != nil || p.leaving != nil {
		t.Error("the pool keeps its buffers")
	}
}
