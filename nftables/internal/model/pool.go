package model

import (
	"math/rand/v2"
	"net/netip"
	"slices"

	v1 "k8s.io/api/core/v1"

	"github.com/go-proxier/proxier/internal/listdiff"
	"github.com/go-proxier/proxier/nftables/internal/layout"
	"github.com/go-proxier/proxier/tracker"
)

// pool holds the endpoints of one Service for one target, in buckets that are numbered without
// a gap, as in the kernel.
type pool struct {
	number   uint32
	protocol v1.Protocol
	// sticky pools are for client affinity: the kernel remembers clients by the number of their endpoint, which an
	// endpoint keeps as long as it is in the pool.
	sticky bool
	// handler is the handler of a sticky pool: see chains.setSticky.
	handler stickyRef
	// buckets holds the endpoint of each bucket. If there is a table, it holds each endpoint
	// once.
	buckets []*tracker.Endpoint
	// numbered reports whether endpoints have numbers: in a sticky pool, and if an endpoint may
	// have several buckets. members holds the numbers in the order of buckets.
	numbered bool
	members  []uint16
	// distribution is how endpoints share the buckets. table holds the number of each bucket's
	// endpoint. It is nil if each endpoint has one bucket.
	distribution distribution
	table        []uint16
	last         uint16 // the number given out last
	wrapped      bool   // all numbers were given out once
	// adopted holds the numbers that endpoints had in an earlier process, until the pool gets
	// its first endpoints.
	adopted map[netip.AddrPort]uint16
	// taken is for newMember in a large or adopted pool, during a call of set only. leaving holds the buckets
	// of endpoints that are removed during the call.
	taken   *memberSet
	leaving []int
}

type memberSet [1 << layout.StickyShift / 64]uint64

func (s *memberSet) has(n uint16) bool { return s[n/64]>>(n%64)&1 != 0 }
func (s *memberSet) add(n uint16)      { s[n/64] |= 1 << (n % 64) }

// newMember returns the number that has been unused the longest. Numbers of endpoints that are
// removed by the same change come last of all.
func (p *pool) newMember() uint16 {
	for tried := 0; ; tried++ {
		if p.last++; p.last == 0 {
			p.wrapped = true
			continue
		}
		if !p.wrapped {
			return p.last
		}
		if len(p.members) <= 128 && p.taken == nil {
			if !slices.Contains(p.members, p.last) {
				return p.last
			}
			continue
		}
		if p.taken == nil || tried > layout.MaxMember {
			p.taken, tried = p.takenMembers(tried <= layout.MaxMember), 0
		}
		if !p.taken.has(p.last) {
			p.taken.add(p.last)
			return p.last
		}
	}
}

// takenMembers returns the numbers of the pool's endpoints, with or without those that leave.
func (p *pool) takenMembers(leaving bool) *memberSet {
	out := &memberSet{}
	for bucket, n := range p.members {
		if _, leaves := slices.BinarySearch(p.leaving, bucket); leaving || !leaves {
			out.add(n)
		}
	}
	return out
}

type poolChange struct {
	before  int            // number of buckets in use before
	buckets []int          // buckets that changed, sorted
	gone    []uint16       // numbers of endpoints that are gone
	come    []memberChange // numbered endpoints that are new
}

// reset sets c to no change of a pool with the given number of buckets.
func (c *poolChange) reset(buckets int) {
	*c = poolChange{before: buckets, buckets: c.buckets[:0], gone: c.gone[:0], come: c.come[:0]}
}

type memberChange struct {
	number uint16
	addr   netip.AddrPort
}

// setEndpoints replaces the pool's endpoints old by list. Both are sorted by address. Endpoints that
// stay keep their buckets as far as possible, so that few elements change.
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
	// An endpoint that stays as it is needs no look-up. changed holds the others of old, each with
	// the endpoint of list that takes its place or nil.
	type change struct{ old, now *tracker.Endpoint }
	var fewChanged [4]change
	var few [4]*tracker.Endpoint
	changed, fresh := fewChanged[:0], few[:0]
	for i, j := 0, 0; i < len(old) || j < len(list); {
		var order int
		switch {
		case i == len(old):
			order = +1
		case j == len(list):
			order = -1
		case old[i] != list[j]:
			order = old[i].Addr.Compare(list[j].Addr)
			if order == 0 {
				changed = append(changed, change{old[i], list[j]})
			}
		}
		if order < 0 {
			changed = append(changed, change{old[i], nil})
		} else if order > 0 {
			fresh = append(fresh, list[j])
		}
		if order <= 0 {
			i++
		}
		if order >= 0 {
			j++
		}
	}
	bucketOf := newFinder(p.buckets, len(changed))
	var holes []int
	for _, ch := range changed {
		bucket := bucketOf.find(ch.old.Addr)
		if ch.now != nil {
			p.buckets[bucket] = ch.now
			continue
		}
		holes = append(holes, bucket)
	}
	p.taken, p.leaving = nil, nil
	if p.numbered && len(list) > 128 {
		p.leaving = slices.Sorted(slices.Values(holes))
	}
	for _, ep := range fresh {
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
	// The last buckets move into the holes that are left.
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
	p.taken, p.leaving = nil, nil
}

// fill sets the endpoints of an empty pool. An endpoint keeps its number of an earlier process.
func (p *pool) fill(list []*tracker.Endpoint, c *poolChange) {
	p.buckets = slices.Clone(list)
	for bucket := range list {
		c.buckets = append(c.buckets, bucket)
	}
	if !p.numbered {
		return
	}
	p.members = make([]uint16, len(list))
	if p.adopted != nil {
		p.taken = &memberSet{} // numbers of removed endpoints are reused only after all others
		for _, n := range p.adopted {
			p.taken.add(n)
		}
		for bucket, ep := range list {
			p.members[bucket] = p.adopted[ep.Addr]
		}
		// The kernel may remember clients by the unknown numbers of removed endpoints. New
		// numbers start at a random one, which makes a clash unlikely.
		p.last, p.wrapped = uint16(rand.N(layout.MaxStickyEndpoints)), true
	}
	for bucket, ep := range list {
		if p.members[bucket] == 0 {
			p.members[bucket] = p.newMember()
		}
		c.come = append(c.come, memberChange{p.members[bucket], ep.Addr})
	}
	p.adopted, p.taken = nil, nil
}

// leave records that the endpoint in the bucket is removed.
func (p *pool) leave(bucket int, c *poolChange) {
	if p.numbered {
		c.gone = append(c.gone, p.members[bucket])
		p.members[bucket] = 0
	}
}

// finder finds endpoints in a list by their address.
type finder struct {
	list  []*tracker.Endpoint
	index map[netip.AddrPort]int
}

// newFinder returns a finder for about n calls. The list must not change before these calls.
func newFinder(list []*tracker.Endpoint, n int) finder {
	f := finder{list: list}
	if n > 4 {
		f.index = make(map[netip.AddrPort]int, len(list))
		for i, ep := range list {
			f.index[ep.Addr] = i
		}
	}
	return f
}

// find returns the index of the endpoint at an address, or -1.
func (f *finder) find(a netip.AddrPort) int {
	if f.index == nil {
		return slices.IndexFunc(f.list, func(ep *tracker.Endpoint) bool { return ep.Addr == a })
	}
	if i, ok := f.index[a]; ok {
		return i
	}
	return -1
}
