package maglev

import (
	"cmp"
	"math/bits"
	"net/netip"
	"slices"
)

// Member is an endpoint in a table.
type Member struct {
	// Addr identifies the member. Of several members with the same Addr only the
	// first is used. An IPv4-mapped IPv6 address means the IPv4 address.
	Addr netip.AddrPort
	// Weight is the member's share of the buckets relative to the others. With 0 it
	// gets none.
	Weight uint16
}

// Table maps each bucket to a member. It never changes and is safe for concurrent
// use. A nil Table has no buckets.
type Table struct {
	slots []uint16
}

// Build returns a table of the size [SizeAtLeast](size). Members are numbered by
// their index. Build returns nil if no member has a weight. If there are more members
// than buckets, those with the lowest addresses get one each. Build ignores members
// after the first 65,535: no table has buckets for them.
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
		w[i].credit = heaviest // every member gets a turn in the first round
	}
	t := &Table{slots: make([]uint16, size)}
	for i := range t.slots {
		t.slots[i] = free
	}
	for left := size; ; {
		for i := range w {
			m := &w[i]
			// The heaviest members get a turn in every round, the others in
			// proportion to their weight, evenly distributed over the rounds.
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

// free marks a bucket without a member.
const (
	free       = 1<<16 - 1
	maxMembers = free
)

// walk is a member's iteration over all buckets in its own order.
type walk struct {
	number         uint16
	weight, credit uint32
	// step counts the numbers below a power of two that were visited. The order is
	// that of the numbers after a bijection, which the factors and addends select
	// from very many. So the orders of two members are unrelated.
	step    uint32
	factors [3]uint32
	addends [3]uint32
	mask    uint32
	shift   uint8
}

// next returns the next bucket of a table of the given size.
func (w *walk) next(size uint32) uint32 {
	for {
		x := w.step
		w.step++
		for i := range w.factors {
			x = (x*w.factors[i] + w.addends[i]) & w.mask
			x ^= x >> w.shift
		}
		if x < size { // the size is slightly below the power of two
			return x
		}
	}
}

// newWalks returns the walks of the members with a weight, sorted by address, each
// address once.
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

// Len returns the number of buckets.
func (t *Table) Len() int {
	if t == nil {
		return 0
	}
	return len(t.slots)
}

// At returns the number of the member of a bucket from 0 to Len()-1. It panics for others.
func (t *Table) At(slot int) int { return int(t.slots[slot]) }

// Find returns the number of the member for a hash: that of the bucket hash * Len() /
// 2^32, as in the kernel's hash expressions (linux/kernel.h, reciprocal_scale). It
// returns 0 for a table without buckets.
func (t *Table) Find(hash uint32) int {
	if t.Len() == 0 {
		return 0
	}
	return int(t.slots[scale(hash, uint32(len(t.slots)))])
}

// sizes lists the sizes of tables: each is the largest prime below a power of two.
// They are the sizes of the kernel's IPVS scheduler mh
// (net/netfilter/ipvs/ip_vs_mh.c) up to 16 bits.
var sizes = [...]int{251, 509, 1021, 2039, 4093, 8191, 16381, 32749, 65521}

// MaxSize is the largest size.
const MaxSize = 65521

// SizeAtLeast returns the smallest size with at least the given number of buckets, or
// [MaxSize].
func SizeAtLeast(slots int) int {
	for _, s := range sizes {
		if s >= slots {
			return s
		}
	}
	return MaxSize
}

// SizeFor returns a size that suits n members of equal weight, with at least 25
// buckets per member while sizes last. It changes at 15, 150 and 650 members. There
// are few sizes because a change of the size moves nearly all connections. Use a
// fixed size if the number of members varies around one of these limits, or if a
// smaller table is needed.
func SizeFor(n int) int {
	switch {
	case n <= 15:
		return 509
	case n <= 150:
		return 4093
	case n <= 650:
		return 16381
	}
	return MaxSize
}
