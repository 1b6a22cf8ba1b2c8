package nftables

import (
	"math/rand/v2"
	"net/netip"
	"slices"
	"time"

	"github.com/go-proxier/proxier/internal/listdiff"
	"github.com/go-proxier/proxier/tracker"
)

// pool is the endpoints of one Service that one kind of its traffic may use, in numbered
// buckets without a gap, as they are in the kernel.
type pool struct {
	number uint32
	// affinity, if not 0, makes it a sticky pool: the kernel remembers clients with the number
	// of their endpoint, which an endpoint keeps as long as it is in the pool although its
	// bucket may change.
	affinity time.Duration
	// buckets has the endpoint of each bucket, unless there is a table.
	buckets []*tracker.Endpoint
	// numbered reports whether endpoints have numbers, as in a sticky pool and in one whose
	// endpoints may have several buckets. members has the numbers in the order of buckets.
	numbered bool
	members  []uint16
	// distribution is how endpoints share the buckets. table has the number of each bucket's
	// endpoint, unless each endpoint has one bucket.
	distribution distribution
	table        []uint16
	last         uint16 // the number given out last
	wrapped      bool   // all numbers were given out once
	// adopted are the numbers that endpoints had in an earlier process, until the pool is
	// first set.
	adopted map[netip.AddrPort]uint16
}

// newMember returns a number that no endpoint of the pool has, the longest unused first.
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

// poolChange is how a pool changed.
type poolChange struct {
	before  int            // number of buckets in use before
	buckets []int          // buckets that changed, sorted
	gone    []uint16       // numbers of endpoints that are gone
	come    []memberChange // numbered endpoints that are new
}

// reset makes c the change of a pool with so many buckets that stays as it is.
func (c *poolChange) reset(buckets int) {
	*c = poolChange{before: buckets, buckets: c.buckets[:0], gone: c.gone[:0], come: c.come[:0]}
}

type memberChange struct {
	number uint16
	addr   netip.AddrPort
}

// setEndpoints replaces the pool's endpoints old by list. Endpoints that stay keep their
// buckets as far as possible, so that few elements change.
func (p *pool) setEndpoints(old, list []*tracker.Endpoint, c *poolChange) {
	c.reset(len(p.buckets))
	old, list = listdiff.Trim(old, list)
	if len(old) == 0 && len(list) == 0 {
		return
	}
	if len(p.buckets) == 0 {
		p.fill(list, c)
		return
	}
	bucketOf := p.finder(len(old))

	wanted := make(map[netip.AddrPort]*tracker.Endpoint, len(list))
	for _, ep := range list {
		wanted[ep.Addr] = ep
	}
	var holes []int
	for _, ep := range old {
		bucket := bucketOf(ep.Addr)
		if now, ok := wanted[ep.Addr]; ok {
			p.buckets[bucket] = now
			delete(wanted, ep.Addr)
			continue
		}
		holes = append(holes, bucket)
	}
	// The endpoints left in wanted are new. They get buckets in the order of list.
	for _, ep := range list {
		if wanted[ep.Addr] != ep {
			continue
		}
		delete(wanted, ep.Addr)
		bucket := len(p.buckets)
		if n := len(holes); n > 0 {
			bucket, holes = holes[n-1], holes[:n-1]
			p.leave(bucket, c)
		} else {
			p.buckets = append(p.buckets, nil)
			if p.numbered {
				p.members = append(p.members, 0)
			}
		}
		p.buckets[bucket] = ep
		if p.numbered {
			p.members[bucket] = p.newMember()
			c.come = append(c.come, memberChange{p.members[bucket], ep.Addr})
		}
		c.buckets = append(c.buckets, bucket)
	}
	// Holes that nothing fills are closed from the end, the last first.
	slices.Sort(holes)
	for _, bucket := range slices.Backward(holes) {
		p.leave(bucket, c)
		end := len(p.buckets) - 1
		if bucket != end {
			p.buckets[bucket] = p.buckets[end]
			if p.numbered {
				p.members[bucket] = p.members[end]
			}
			c.buckets = append(c.buckets, bucket)
		}
		c.buckets = append(c.buckets, end)
		p.buckets[end] = nil
		p.buckets = p.buckets[:end]
		if p.numbered {
			p.members = p.members[:end]
		}
	}
	slices.Sort(c.buckets)
	c.buckets = slices.Compact(c.buckets)
}

// fill sets an empty pool's endpoints. Those that had a number in an earlier process keep it.
func (p *pool) fill(list []*tracker.Endpoint, c *poolChange) {
	p.buckets = slices.Clone(list)
	for bucket := range list {
		c.buckets = append(c.buckets, bucket)
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
		for bucket, ep := range list {
			p.members[bucket] = p.adopted[ep.Addr]
		}
		// Clients may be remembered with numbers of endpoints that were gone by then, which are
		// not known. New endpoints most likely get other numbers if these start anywhere.
		p.last, p.wrapped = uint16(rand.N(maxStickyEndpoints)), true
	}
	for bucket, ep := range list {
		if p.members[bucket] == 0 {
			p.members[bucket] = p.unusedMember(taken)
		}
		c.come = append(c.come, memberChange{p.members[bucket], ep.Addr})
	}
	p.adopted = nil
}

// unusedMember returns the next number that is not taken, and takes it. Numbers of endpoints
// that are gone stay taken as long as there are others.
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

// leave records that the endpoint in the bucket is gone.
func (p *pool) leave(bucket int, c *poolChange) {
	if p.numbered {
		c.gone = append(c.gone, p.members[bucket])
		p.members[bucket] = 0
	}
}

// finder returns a function that finds an endpoint's bucket; n says how many will
// be looked for. Slots do not move while it is in use.
func (p *pool) finder(n int) func(netip.AddrPort) int {
	if n <= 4 {
		return func(a netip.AddrPort) int {
			return slices.IndexFunc(p.buckets, func(ep *tracker.Endpoint) bool { return ep.Addr == a })
		}
	}
	index := make(map[netip.AddrPort]int, len(p.buckets))
	for i, ep := range p.buckets {
		index[ep.Addr] = i
	}
	return func(a netip.AddrPort) int { return index[a] }
}
