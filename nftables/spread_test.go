//go:build linux

package nftables

import (
	"math/rand/v2"
	"net/netip"
	"slices"
	"testing"
	"time"

	v1 "k8s.io/api/core/v1"

	"github.com/go-proxier/proxier/internal/netlab"
	"github.com/go-proxier/proxier/ruleset/conformance/worldgen"
	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/ruleset/maglev"
	"github.com/go-proxier/proxier/tracker"
)

// TestSpreadPools changes pools at random, between all ways of sharing slots, and
// replays what the changes say on a model of the kernel's map.
func TestSpreadPools(t *testing.T) {
	for _, affinity := range []time.Duration{0, time.Hour} {
		rng := rand.New(rand.NewPCG(9, uint64(affinity)))
		p := &pool{number: 3, affinity: affinity}
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
			how := []spread{{}, {weighted: true}, {size: 251}, {size: 509}}[rng.IntN(4)]
			if rng.IntN(3) != 0 {
				how = p.spread
			}
			if len(next) == 0 {
				how = spread{}
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
			for _, slot := range c.slots {
				if _, ok := kernel[slot]; ok != (slot < c.before) {
					t.Fatalf("step %d: slot %d is there: %t", step, slot, ok)
				}
				delete(kernel, slot)
				if slot < p.size() {
					kernel[slot] = addr(slot)
				}
			}
			if len(kernel) != p.size() {
				t.Fatalf("step %d: %d slots, want %d", step, len(kernel), p.size())
			}
			has := map[netip.AddrPort]int{}
			for slot := range p.size() {
				if kernel[slot] != addr(slot) {
					t.Fatalf("step %d: slot %d has %s, not %s", step, slot, kernel[slot], addr(slot))
				}
				has[kernel[slot]]++
				if affinity != 0 && members[p.member(slot)] != kernel[slot] {
					t.Fatalf("step %d: number %d is of %s, not %s", step, p.member(slot), members[p.member(slot)], kernel[slot])
				}
				if tab != nil && next[tab.At(slot)].Addr != kernel[slot] {
					t.Fatalf("step %d: slot %d of the table has %s", step, slot, kernel[slot])
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
					t.Fatalf("step %d, %+v: %s has %d slots, want %d", step, how, ep, has[ep.Addr], want)
				}
			}
		}
	}
}

// TestCostOfASpreadChange counts the elements that a change of a weighted and of a
// hashed Service takes: those of what moves.
func TestCostOfASpreadChange(t *testing.T) {
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
	// The slots that change hands, and those of one in ten and in twenty more at the
	// most; each is deleted and added. No other Service is written, nor is a ticket.
	moved := func(a, b int) int {
		n, tables := 0, [2][]netip.Addr{}
		for i, eps := range []int{a, b} {
			members := make([]maglev.Member, eps)
			for j := range members {
				members[j] = maglev.Member{Addr: netip.AddrPortFrom(netip.AddrFrom4([4]byte{10, 244, 0, byte(j + 1)}), 8080), Weight: 1}
			}
			t := maglev.Build(0, maglev.SizeFor(eps), members)
			for slot := range t.Len() {
				tables[i] = append(tables[i], members[t.At(slot)].Addr.Addr())
			}
		}
		for slot := range tables[0] {
			if tables[0][slot] != tables[1][slot] {
				n++
			}
		}
		return n
	}(10, 9)
	if moved > 509/10+509/20 {
		t.Errorf("%d of 509 slots change hands", moved)
	}
	count("an endpoint of 10 removed from a hashed Service", 2*moved, func() { set(0, nil, upTo(9)...) })
	count("an endpoint added to 9 of a hashed Service", 2*moved, func() { set(0, nil, upTo(10)...) })
	// A slot, the ticket and the chain for one slot more.
	count("a weight raised by one", 8, func() {
		weights["10.244.0.2"] = 4
		set(1, weights, upTo(10)...)
	})
	count("a weight lowered by one", 8, func() {
		weights["10.244.0.2"] = 3
		set(1, weights, upTo(10)...)
	})
}
