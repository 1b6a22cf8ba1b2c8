//go:build linux

package nftables

import (
	"math/rand/v2"
	"net/netip"
	"slices"
	"time"

	"github.com/go-proxier/proxier/tracker"
)

// pool is the endpoints of one Service that one kind of its traffic may use, as
// the kernel knows them: numbered slots without a gap.
type pool struct {
	number uint32
	// affinity, if not 0, makes it a sticky pool: clients are remembered with the
	// endpoint they were sent to, by a number that an endpoint keeps as long as it
	// is in the pool, because its slot may change.
	affinity time.Duration
	// slots is the endpoints, each at the place of its slot, unless there is a table.
	slots []*tracker.Endpoint
	// numbered: the endpoints have numbers, as in a sticky pool and in one whose
	// slots are not spread evenly; members is these, in the order of slots.
	numbered bool
	members  []uint16
	// spread is how the slots are shared; table says, unless one endpoint has one
	// slot, which endpoint each is of, by number.
	spread  spread
	table   []uint16
	last    uint16 // the number given out last
	wrapped bool   // all numbers were given out once
	// adopted is the numbers that endpoints had in an earlier process, until the
	// pool is first set.
	adopted map[netip.AddrPort]uint16
}

// newMember returns a number no endpoint of the pool has, the longest unused first.
func (p *pool) newMember() uint16 {
	for {
		p.last++
		if p.last == 0 {
			p.wrapped = true
			continue
		}
		if !p.wrapped || !slices.Contains(p.members, p.last) {
			return p.last
		}
	}
}

// poolChange is what applying a new list of endpoints did to a pool.
type poolChange struct {
	before int            // number of slots in use before
	slots  []int          // slots whose content changed, sorted
	gone   []uint16       // numbers that are no longer in use, where there are any
	come   []memberChange // and those that are new
}

type memberChange struct {
	number uint16
	addr   netip.AddrPort
}

// setEndpoints replaces the pool's endpoints, given as a list that was old.
// Endpoints that stay keep their slots as far as possible, so that few elements
// change.
func (p *pool) setEndpoints(old, list []*tracker.Endpoint, c *poolChange) {
	*c = poolChange{before: len(p.slots), slots: c.slots[:0], gone: c.gone[:0], come: c.come[:0]}
	old, list = differing(old, list)
	if len(old) == 0 && len(list) == 0 {
		return
	}
	if len(p.slots) == 0 {
		p.fill(list, c)
		return
	}
	slotOf := p.finder(len(old))

	wanted := make(map[netip.AddrPort]*tracker.Endpoint, len(list))
	for _, ep := range list {
		wanted[ep.Addr] = ep
	}
	var holes []int
	for _, ep := range old {
		slot := slotOf(ep.Addr)
		if now, ok := wanted[ep.Addr]; ok {
			p.slots[slot] = now
			delete(wanted, ep.Addr)
			continue
		}
		holes = append(holes, slot)
	}
	// What is left in wanted is new; list is gone through for its order.
	for _, ep := range list {
		if wanted[ep.Addr] != ep {
			continue
		}
		delete(wanted, ep.Addr)
		slot := len(p.slots)
		if n := len(holes); n > 0 {
			slot, holes = holes[n-1], holes[:n-1]
			p.leave(slot, c)
		} else {
			p.slots = append(p.slots, nil)
			if p.numbered {
				p.members = append(p.members, 0)
			}
		}
		p.slots[slot] = ep
		if p.numbered {
			p.members[slot] = p.newMember()
			c.come = append(c.come, memberChange{p.members[slot], ep.Addr})
		}
		c.slots = append(c.slots, slot)
	}
	// Holes that nothing fills are closed from the end, the last first.
	slices.Sort(holes)
	for _, slot := range slices.Backward(holes) {
		p.leave(slot, c)
		end := len(p.slots) - 1
		if slot != end {
			p.slots[slot] = p.slots[end]
			if p.numbered {
				p.members[slot] = p.members[end]
			}
			c.slots = append(c.slots, slot)
		}
		c.slots = append(c.slots, end)
		p.slots[end] = nil
		p.slots = p.slots[:end]
		if p.numbered {
			p.members = p.members[:end]
		}
	}
	slices.Sort(c.slots)
	c.slots = slices.Compact(c.slots)
}

// differing returns the lists without what they have in common at their ends. Most
// updates touch one endpoint, and unchanged ones keep their pointers.
func differing(a, b []*tracker.Endpoint) (_, _ []*tracker.Endpoint) {
	for len(a) > 0 && len(b) > 0 && a[0] == b[0] {
		a, b = a[1:], b[1:]
	}
	for len(a) > 0 && len(b) > 0 && a[len(a)-1] == b[len(b)-1] {
		a, b = a[:len(a)-1], b[:len(b)-1]
	}
	return a, b
}

// fill sets an empty pool's endpoints. Those that had a number before a restart
// get it again.
func (p *pool) fill(list []*tracker.Endpoint, c *poolChange) {
	p.slots = slices.Clone(list)
	for slot := range list {
		c.slots = append(c.slots, slot)
	}
	if !p.numbered {
		return
	}
	p.members = make([]uint16, len(list))
	var taken map[uint16]bool
	if p.adopted != nil {
		taken = make(map[uint16]bool, len(p.adopted))
		for _, n := range p.adopted {
			taken[n] = true
		}
		for slot, ep := range list {
			p.members[slot] = p.adopted[ep.Addr]
		}
		// Which numbers were given out and are no longer in use nobody knows, and
		// clients may be remembered by them. Beginning just anywhere, new endpoints most
		// likely get others.
		p.last, p.wrapped = uint16(rand.N(maxStickyEndpoints)), true
	}
	for slot, ep := range list {
		if p.members[slot] == 0 {
			p.members[slot] = p.unusedMember(taken)
		}
		c.come = append(c.come, memberChange{p.members[slot], ep.Addr})
	}
	p.adopted = nil
}

// unusedMember returns the next number that is not taken, and takes it. Numbers
// of endpoints that are gone are taken as long as there are others.
func (p *pool) unusedMember(taken map[uint16]bool) uint16 {
	if taken == nil {
		return p.newMember()
	}
	if len(taken) >= maxStickyEndpoints {
		clear(taken)
		for _, n := range p.members {
			taken[n] = true
		}
	}
	for p.last++; p.last == 0 || taken[p.last]; p.last++ {
	}
	taken[p.last] = true
	return p.last
}

// leave notes that the endpoint in the slot is gone.
func (p *pool) leave(slot int, c *poolChange) {
	if p.numbered {
		c.gone = append(c.gone, p.members[slot])
		p.members[slot] = 0
	}
}

// finder returns a function that finds an endpoint's slot; n says how many will
// be looked for. Slots do not move while it is in use.
func (p *pool) finder(n int) func(netip.AddrPort) int {
	if n <= 4 {
		return func(a netip.AddrPort) int {
			return slices.IndexFunc(p.slots, func(ep *tracker.Endpoint) bool { return ep.Addr == a })
		}
	}
	index := make(map[netip.AddrPort]int, len(p.slots))
	for i, ep := range p.slots {
		index[ep.Addr] = i
	}
	return func(a netip.AddrPort) int { return index[a] }
}

// numbers gives out the numbers of pools, from 1 to max. One that was given back
// is used again only after all others were, so that no packet that read it before
// can be meant for its next owner.
type numbers struct {
	max uint32
	// next counts those given out or passed over, from the one behind start.
	start, next uint32
	// kept is passed over.
	kept map[uint32]bool
	free []uint32
}

// take returns a number, or false if all are in use.
func (n *numbers) take() (uint32, bool) {
	for n.next < n.max {
		v := (n.start+n.next)%n.max + 1
		n.next++
		if !n.kept[v] {
			return v, true
		}
	}
	if len(n.free) == 0 {
		return 0, false
	}
	v := n.free[0]
	n.free = n.free[1:]
	return v, true
}

func (n *numbers) give(v uint32) { n.free = append(n.free, v) }
