//go:build linux

package nftables

import (
	"net/netip"
	"slices"

	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/ruleset/maglev"
	"github.com/go-proxier/proxier/tracker"
)

// spread is how a pool's slots are shared among its endpoints. The zero value is
// one slot each.
type spread struct {
	// weighted: by their weights.
	weighted bool
	// size, if not 0, is that of the table that the slots are those of, which a hash
	// leads to. Weights are part of it.
	size int
}

func spreadOf(s *ruleset.Service, t ruleset.Target) spread {
	if size := s.HashSlots(t); size != 0 {
		return spread{size: size}
	}
	return spread{weighted: s.Weighted(t)}
}

// slotsOf returns the number of slots of the Service's pool for the target.
func slotsOf(s *ruleset.Service, t ruleset.Target) int {
	pool := s.Pool(t)
	switch how := spreadOf(s, t); {
	case how.size != 0:
		return how.size
	case how.weighted:
		return ruleset.TotalShares(pool)
	}
	return len(pool)
}

// classSlots returns the number of slots that are drawn from, or of those that a
// hash leads to.
func classSlots(s *ruleset.Service, t ruleset.Target) int {
	if size := s.HashSlots(t); size != 0 {
		return size
	}
	return slotsFor(slotsOf(s, t))
}

// maxSpreadEndpoints is how many endpoints a pool can have whose slots are not
// spread evenly. Half of the numbers are left for those that take their places.
const maxSpreadEndpoints = 1<<15 - 1

// set replaces the pool's endpoints, given as a list that was old, and how the
// slots are shared. hashed makes the table, if there is to be one. Slots change
// as little as that allows.
func (p *pool) set(old, list []*tracker.Endpoint, how spread, hashed func() *maglev.Table, c *poolChange) {
	plain := spread{}
	if p.spread == plain && how == plain {
		p.numbered = p.affinity != 0
		p.setEndpoints(old, list, c)
		return
	}
	if a, b := differing(old, list); p.spread == how && len(a)+len(b) == 0 {
		c.none(p.size())
		return
	}
	before := p.table
	if p.spread == plain {
		p.giveNumbers()
		before = slices.Clone(p.members)
	}
	p.setEndpoints(old, list, c)
	p.spread, p.table = how, nil
	now := p.members
	switch {
	case how.size != 0:
		p.table = p.spreadBy(hashed(), list)
		now = p.table
	case how.weighted:
		p.table = allot(before, p.members, ruleset.Shares(p.slots))
		now = p.table
	}
	c.before, c.slots = len(before), c.slots[:0]
	for slot := range max(len(before), len(now)) {
		if slot >= len(before) || slot >= len(now) || before[slot] != now[slot] {
			c.slots = append(c.slots, slot)
		}
	}
	if how == plain && p.affinity == 0 {
		p.numbered, p.members, p.last, p.wrapped = false, nil, 0, false
	}
}

// none notes that nothing changed.
func (c *poolChange) none(slots int) {
	*c = poolChange{before: slots, slots: c.slots[:0], gone: c.gone[:0], come: c.come[:0]}
}

// giveNumbers gives numbers to endpoints that have none.
func (p *pool) giveNumbers() {
	if p.numbered {
		return
	}
	p.numbered, p.members = true, make([]uint16, len(p.slots))
	for i := range p.members {
		p.members[i] = p.newMember()
	}
}

// size returns the number of slots.
func (p *pool) size() int {
	if p.table != nil {
		return len(p.table)
	}
	return len(p.slots)
}

// member returns the number of the endpoint that has the slot.
func (p *pool) member(slot int) uint16 {
	if p.table != nil {
		return p.table[slot]
	}
	return p.members[slot]
}

// addresses returns a function that returns the address of a slot's endpoint.
func (p *pool) addresses() func(slot int) netip.AddrPort {
	if p.table == nil {
		return func(slot int) netip.AddrPort { return p.slots[slot].Addr }
	}
	of := make(map[uint16]netip.AddrPort, len(p.slots))
	for i, ep := range p.slots {
		of[p.members[i]] = ep.Addr
	}
	return func(slot int) netip.AddrPort { return of[p.table[slot]] }
}

// spreadBy returns the table in the pool's own numbers; in t they are places in
// list.
func (p *pool) spreadBy(t *maglev.Table, list []*tracker.Endpoint) []uint16 {
	numbers := make(map[netip.AddrPort]uint16, len(p.slots))
	for i, ep := range p.slots {
		numbers[ep.Addr] = p.members[i]
	}
	of := make([]uint16, len(list))
	for i, ep := range list {
		of[i] = numbers[ep.Addr]
	}
	out := make([]uint16, t.Len())
	for slot := range out {
		out[slot] = of[t.At(slot)]
	}
	return out
}

// allot returns which endpoint each slot is of if each has as many as its share
// says. As few slots as possible differ from before.
func allot(before, members []uint16, shares []int) []uint16 {
	want := make(map[uint16]int, len(members))
	for i, n := range members {
		want[n] = shares[i]
	}
	now := slices.Clone(before)
	var holes []int
	for slot, n := range now {
		if want[n] > 0 {
			want[n]--
		} else {
			holes = append(holes, slot)
		}
	}
	for _, n := range members {
		for range want[n] {
			if last := len(holes) - 1; last >= 0 {
				now[holes[last]], holes = n, holes[:last]
			} else {
				now = append(now, n)
			}
		}
	}
	for _, slot := range slices.Backward(holes) {
		end := len(now) - 1
		now[slot], now = now[end], now[:end]
	}
	return now
}
