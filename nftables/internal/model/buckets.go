package model

import (
	"net/netip"
	"slices"

	"github.com/go-proxier/proxier/internal/listdiff"
	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/ruleset/maglev"
	"github.com/go-proxier/proxier/tracker"
)

// distribution is how a pool's endpoints share its buckets. The zero value gives each endpoint
// one bucket.
type distribution struct {
	// weighted gives each endpoint buckets by its weight.
	weighted bool
	// size, if not 0, is the number of buckets of a Maglev table. The table takes weights into
	// account.
	size int
}

// set replaces the pool's endpoints old by list and sets how they share the buckets. hashed
// returns the Maglev table, if how has one. set changes as few buckets as possible.
func (p *pool) set(old, list []*tracker.Endpoint, how distribution, hashed func() *maglev.Table, c *poolChange) {
	plain := distribution{}
	if p.distribution == plain && how == plain {
		p.numbered = p.sticky
		p.setEndpoints(old, list, c)
		return
	}
	if a, b := listdiff.Trim(old, list); p.distribution == how && len(a)+len(b) == 0 {
		c.reset(p.size())
		return
	}
	before := p.table
	if p.distribution == plain {
		p.giveNumbers()
		before = slices.Clone(p.members)
	}
	p.setEndpoints(old, list, c)
	p.distribution, p.table = how, nil
	now := p.members
	switch {
	case how.size != 0:
		p.table = p.distributeBy(hashed(), list)
		now = p.table
	case how.weighted:
		p.table = allot(before, p.members, ruleset.Shares(p.buckets))
		now = p.table
	}
	c.before, c.buckets = len(before), c.buckets[:0]
	for bucket := range max(len(before), len(now)) {
		if bucket >= len(before) || bucket >= len(now) || before[bucket] != now[bucket] {
			c.buckets = append(c.buckets, bucket)
		}
	}
	if how == plain && !p.sticky {
		p.numbered, p.members, p.last, p.wrapped = false, nil, 0, false
	}
}

func (p *pool) giveNumbers() {
	if p.numbered {
		return
	}
	p.numbered, p.members = true, make([]uint16, len(p.buckets))
	for i := range p.members {
		p.members[i] = p.newMember()
	}
}

func (p *pool) size() int {
	if p.table != nil {
		return len(p.table)
	}
	return len(p.buckets)
}

// member returns the number of a bucket's endpoint.
func (p *pool) member(bucket int) uint16 {
	if p.table != nil {
		return p.table[bucket]
	}
	return p.members[bucket]
}

// addresses returns the addresses of the pool's endpoints by number, nil if each endpoint has one
// bucket.
func (p *pool) addresses() map[uint16]netip.AddrPort {
	if p.table == nil {
		return nil
	}
	of := make(map[uint16]netip.AddrPort, len(p.buckets))
	for i, ep := range p.buckets {
		of[p.members[i]] = ep.Addr
	}
	return of
}

// address returns the address of a bucket's endpoint. of is the result of addresses.
func (p *pool) address(bucket int, of map[uint16]netip.AddrPort) netip.AddrPort {
	if p.table == nil {
		return p.buckets[bucket].Addr
	}
	return of[p.table[bucket]]
}

// distributeBy returns t with the pool's numbers of endpoints in place of indices into list.
func (p *pool) distributeBy(t *maglev.Table, list []*tracker.Endpoint) []uint16 {
	numbers := make(map[netip.AddrPort]uint16, len(p.buckets))
	for i, ep := range p.buckets {
		numbers[ep.Addr] = p.members[i]
	}
	of := make([]uint16, len(list))
	for i, ep := range list {
		of[i] = numbers[ep.Addr]
	}
	out := make([]uint16, t.Len())
	for bucket := range out {
		out[bucket] = of[t.At(bucket)]
	}
	return out
}

// allot returns the number of each bucket's endpoint such that each endpoint has its share of
// the buckets. As few buckets as possible differ from before.
func allot(before, members []uint16, shares []int) []uint16 {
	want := make(map[uint16]int, len(members))
	for i, n := range members {
		want[n] = shares[i]
	}
	now := slices.Clone(before)
	var holes []int
	for bucket, n := range now {
		if want[n] > 0 {
			want[n]--
		} else {
			holes = append(holes, bucket)
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
	for _, bucket := range slices.Backward(holes) {
		end := len(now) - 1
		now[bucket], now = now[end], now[:end]
	}
	return now
}
