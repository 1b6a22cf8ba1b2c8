package model

import (
	"math/rand/v2"
	"net/netip"
	"slices"
	"testing"

	"github.com/go-proxier/proxier/ruleset"
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
			of := p.addresses()
			addr := func(bucket int) netip.AddrPort { return p.address(bucket, of) }
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
