package maglev

import (
	"cmp"
	"math/bits"
	"net/netip"
	"slices"
)

// Member is an endpoint that shares in a table.
type Member struct {
	// Addr tells it from the others; of several with the same the first counts. An
	// IPv4-mapped IPv6 address stands for the IPv4 address.
	Addr netip.AddrPort
	// Weight is its share of the slots relative to the others'. 0 is none.
	Weight uint16
}

// Table says which member each slot belongs to. It is never changed once it is
// made, and safe for concurrent use. A nil Table has no slots.
type Table struct {
	slots []uint16
}

// Build makes a table. The size is that of [SizeAtLeast] the given one; members
// are numbered as they are in the list. It returns nil if no member has a weight.
// Of more members than there are slots, those with the lowest addresses get one
// each. What is beyond the first 65,535 of the list is left out: there are no slots
// for more.
func Build(seed uint64, size int, members []Member) *Table {
	members = members[:min(len(members), maxMembers)]
	size = SizeAtLeast(size)
	w := newWalks(seed, uint32(size), members)
	if len(w) == 0 {
		return nil
	}
	var heaviest uint32
	for i := range w {
		heaviest = max(heaviest, w[i].weight)
	}
	for i := range w {
		w[i].credit = heaviest // everybody has a turn in the first round
	}
	t := &Table{slots: make([]uint16, size)}
	for i := range t.slots {
		t.slots[i] = free
	}
	for left := size; ; {
		for i := range w {
			m := &w[i]
			// The heaviest has a turn in every round, the others as often as their
			// weight says, spread evenly over the rounds.
			due := m.credit >= heaviest
			m.credit += m.weight
			if !due {
				continue
			}
			m.credit -= heaviest
			at := m.next(uint32(size))
			for t.slots[at] != free {
				at = m.next(uint32(size))
			}
			t.slots[at] = m.number
			if left--; left == 0 {
				return t
			}
		}
	}
}

// free marks a slot that nobody has yet.
const (
	free       = 1<<16 - 1
	maxMembers = free
)

// walk is a member on its way through all slots, in an order of its own.
type walk struct {
	number         uint16
	weight, credit uint32
	// step is how many numbers below a power of two were gone through. The order is
	// that of the numbers, each put through a bijection that the factors and addends
	// make one of very many: those of two members have nothing to do with each
	// other.
	step    uint32
	factors [3]uint32
	addends [3]uint32
	mask    uint32
	shift   uint8
}

// next returns the next slot of a table of the size.
func (w *walk) next(size uint32) uint32 {
	for {
		x := w.step
		w.step++
		for i := range w.factors {
			x = (x*w.factors[i] + w.addends[i]) & w.mask
			x ^= x >> w.shift
		}
		if x < size { // the size is little less than the power of two
			return x
		}
	}
}

// newWalks returns the members with a weight, sorted by address, each address once.
func newWalks(seed uint64, size uint32, members []Member) []walk {
	order := make([]uint16, len(members))
	for i := range order {
		order[i] = uint16(i)
	}
	byAddr := func(a, b uint16) int { return canonical(members[a].Addr).Compare(canonical(members[b].Addr)) }
	slices.SortFunc(order, func(a, b uint16) int { return cmp.Or(byAddr(a, b), cmp.Compare(a, b)) })
	order = slices.CompactFunc(order, func(a, b uint16) bool { return byAddr(a, b) == 0 })
	order = slices.DeleteFunc(order, func(n uint16) bool { return members[n].Weight == 0 })
	width := bits.Len32(size)
	out := make([]walk, len(order))
	for i, n := range order {
		h := hash(seed, members[n].Addr)
		w := walk{number: n, weight: uint32(members[n].Weight), mask: 1<<width - 1, shift: uint8(width+1) / 2}
		for r := range w.factors {
			w.factors[r], w.addends[r] = uint32(h)|1, uint32(h>>32)
			h = mix(h)
		}
		out[i] = w
	}
	return out
}

func canonical(a netip.AddrPort) netip.AddrPort {
	return netip.AddrPortFrom(a.Addr().Unmap(), a.Port())
}

// Len returns the number of slots.
func (t *Table) Len() int {
	if t == nil {
		return 0
	}
	return len(t.slots)
}

// At returns the number of the member that a slot from 0 to Len()-1 belongs to.
func (t *Table) At(slot int) int { return int(t.slots[slot]) }

// Find returns the number of the member that a hash leads to: that of the slot
// hash * Len() / 2^32, as the kernel's own hash expressions have it
// (linux/kernel.h, reciprocal_scale). It is 0 for a table without slots.
func (t *Table) Find(hash uint32) int {
	if t.Len() == 0 {
		return 0
	}
	return int(t.slots[scale(hash, uint32(len(t.slots)))])
}
