package nftables

import (
	"net/netip"
	"slices"

	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/ruleset/maglev"
	"github.com/go-proxier/proxier/tracker"
)

// distribution is how a pool's buckets are shared among its endpoints. The zero value is
// one bucket each.
type distribution struct {
	// weighted: by their weights.
	weighted bool
	// size, if not 0, is that of the table that the buckets are those of, which a hash
	// leads to. Weights are part of it.
	size int
}

func distributionOf(s *ruleset.Service, t ruleset.Target) distribution {
	if size := s.HashSlots(t); size != 0 {
		return distribution{size: size}
	}
	return distribution{weighted: s.Weighted(t)}
}

// bucketsOf returns the number of buckets of the Service's pool for the target.
func bucketsOf(s *ruleset.Service, t ruleset.Target) int {
	pool := s.Pool(t)
	switch how := distributionOf(s, t); {
	case how.size != 0:
		return how.size
	case how.weighted:
		return ruleset.TotalShares(pool)
	}
	return len(pool)
}

// handlerBuckets returns the number of buckets that are drawn from, or of those that a
// hash leads to.
func handlerBuckets(s *ruleset.Service, t ruleset.Target) int {
	if size := s.HashSlots(t); size != 0 {
		return size
	}
	return bucketsFor(bucketsOf(s, t))
}

// maxNumberedEndpoints is how many endpoints a pool can have whose buckets are not
// distribution evenly. Half of the numbers are left for those that take their places.
const maxNumberedEndpoints = 1<<15 - 1

// set replaces the pool's endpoints, given as a list that was old, and how the
// buckets are shared. hashed makes the table, if there is to be one. Slots change
// as little as that allows.
func (p *pool) set(old, list []*tracker.Endpoint, how distribution, hashed func() *maglev.Table, c *poolChange) {
	plain := distribution{}
	if p.distribution == plain && how == plain {
		p.numbered = p.affinity != 0
		p.setEndpoints(old, list, c)
		return
	}
	if a, b := differing(old, list); p.distribution == how && len(a)+len(b) == 0 {
		c.none(p.size())
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
	if how == plain && p.affinity == 0 {
		p.numbered, p.members, p.last, p.wrapped = false, nil, 0, false
	}
}

// none notes that nothing changed.
func (c *poolChange) none(buckets int) {
	*c = poolChange{before: buckets, buckets: c.buckets[:0], gone: c.gone[:0], come: c.come[:0]}
}

// giveNumbers gives numbers to endpoints that have none.
func (p *pool) giveNumbers() {
	if p.numbered {
		return
	}
	p.numbered, p.members = true, make([]uint16, len(p.buckets))
	for i := range p.members {
		p.members[i] = p.newMember()
	}
}

// size returns the number of buckets.
func (p *pool) size() int {
	if p.table != nil {
		return len(p.table)
	}
	return len(p.buckets)
}

// member returns the number of the endpoint that has the bucket.
func (p *pool) member(bucket int) uint16 {
	if p.table != nil {
		return p.table[bucket]
	}
	return p.members[bucket]
}

// addresses returns a function that returns the address of a bucket's endpoint.
func (p *pool) addresses() func(bucket int) netip.AddrPort {
	if p.table == nil {
		return func(bucket int) netip.AddrPort { return p.buckets[bucket].Addr }
	}
	of := make(map[uint16]netip.AddrPort, len(p.buckets))
	for i, ep := range p.buckets {
		of[p.members[i]] = ep.Addr
	}
	return func(bucket int) netip.AddrPort { return of[p.table[bucket]] }
}

// distributeBy returns the table in the pool's own numbers; in t they are places in
// list.
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

// allot returns which endpoint each bucket is of if each has as many as its share
// says. As few buckets as possible differ from before.
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
