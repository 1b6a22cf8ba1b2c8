package model

import (
	"net/netip"
	"slices"

	"github.com/go-proxier/proxier/nftables/internal/layout"
	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/ruleset/maglev"
	"github.com/go-proxier/proxier/tracker"
)

// pools is the department of pools: of their numbers and the elements of their endpoints.
type pools struct {
	*common
	plain, sticky numbers
	// adopted holds the sticky pools of an earlier table that no Service has taken over.
	adopted book[StickyOwner, *AdoptedPool]
	saved   savedPools
	change  poolChange // a buffer
}

func newPools(c *common) pools {
	d := &c.draft
	return pools{
		common: c, plain: newNumbers(c.config.Plain, d), sticky: newNumbers(c.config.Sticky, d),
		adopted: newBook[StickyOwner, *AdoptedPool](d), saved: savedPools{draft: d},
	}
}

// savedPools holds pools before their changes. It keeps its memory from one change to the next.
type savedPools struct {
	draft *draft
	list  []savedPool
}

type savedPool struct {
	pool    *pool
	was     pool
	buckets []*tracker.Endpoint
	members []uint16
}

// maxSavedPool is the largest pool whose copy is kept from one change to the next.
const maxSavedPool = 1 << 10

// save copies a pool that changes.
func (l *savedPools) save(p *pool) {
	if n := len(l.list); n < cap(l.list) {
		l.list = l.list[:n+1]
	} else {
		l.list = append(l.list, savedPool{})
	}
	s := &l.list[len(l.list)-1]
	if cap(s.buckets) > maxSavedPool {
		*s = savedPool{}
	}
	s.pool, s.was = p, *p
	s.buckets, s.members = append(s.buckets[:0], p.buckets...), append(s.members[:0], p.members...)
	l.draft.log = append(l.draft.log, l)
}

func (l *savedPools) drop() {
	s := &l.list[len(l.list)-1]
	*s.pool = s.was
	s.pool.buckets, s.pool.members = slices.Clone(s.buckets), slices.Clone(s.members)
	l.list = l.list[:len(l.list)-1]
}

func (l *savedPools) keep() { l.list = l.list[:0] }

// allocate returns the pool of the Service for a target: old if that is of the right kind, or a new
// one. If there is no number for a sticky pool, the pool is of the other kind. Without a number
// for any pool, it returns nil.
func (p *pools) allocate(old *pool, s *ruleset.Port, target ruleset.Target) *pool {
	if old != nil && old.sticky == (s.Spec.Affinity != 0) {
		return old
	}
	if s.Spec.Affinity != 0 {
		if p := p.newSticky(s, target); p != nil {
			return p
		}
		if old != nil {
			return old
		}
	}
	n, ok := p.plain.take()
	if !ok {
		return nil
	}
	return &pool{number: n, protocol: s.Key.Protocol}
}

// newSticky returns a new sticky pool, or the one that the Service had in an earlier table. It
// returns nil if there is no number left.
func (p *pools) newSticky(s *ruleset.Port, target ruleset.Target) *pool {
	owner := ownerOf(s.Key, target)
	if a := p.adopted.now[owner]; a != nil {
		p.adopted.delete(owner)
		return &pool{sticky: true, number: a.number, adopted: a.members}
	}
	n, ok := p.sticky.take()
	if !ok {
		return nil
	}
	return &pool{sticky: true, number: layout.StickyMark | n}
}

// free gives back the numbers of the pools that a Service lost.
func (p *pools) free(old, now *service) {
	for _, target := range targets {
		switch was := old.pools[target]; {
		case was == nil || was == now.pools[target]:
		case was.sticky:
			p.sticky.give(was.number &^ layout.StickyMark)
		default:
			p.plain.give(was.number)
		}
	}
}

// empty removes the endpoints of a pool that its Service loses.
func (p *pools) empty(was *pool, before *ruleset.Port, target ruleset.Target, tx *Tx) {
	p.saved.save(was)
	was.set(before.Pool(target), nil, distribution{}, nil, &p.change)
	p.addChange(was, "", tx)
}

// write adds the buckets and the numbered endpoints by which a pool changes. fresh tells that the
// pool is new.
func (p *pools) write(is *pool, fresh bool, before, after *ruleset.Port, target ruleset.Target, tx *Tx) {
	var list []*tracker.Endpoint
	if !fresh {
		list = before.Pool(target)
	}
	wanted, how := after.Pool(target), distributionOf(after, target)
	if !fresh && how == is.distribution && sameSlice(list, wanted) {
		return
	}
	if !fresh {
		p.saved.save(is)
	}
	hashed := func() *maglev.Table { return after.Maglev(target, p.Node.HashSeed) }
	is.set(list, wanted, how, hashed, &p.change)
	comment := ""
	if is.sticky && len(p.change.come) != 0 {
		comment = string(ownerOf(after.Key, target))
	}
	p.addChange(is, comment, tx)
}

// setHandler adds the new handler of a sticky pool, which may be none.
func (p *pools) setHandler(of *pool, h stickyRef, tx *Tx) {
	p.saved.save(of)
	if of.handler != (stickyRef{}) {
		e := stickyPoolElement(of)
		tx.remove(p.Family, &e)
	}
	if of.handler = h; h != (stickyRef{}) {
		e := stickyPoolElement(of)
		tx.add(p.Family, &e, "")
	}
}

// addChange adds p.change, the pool's change. comment is for the endpoints of a sticky pool.
func (p *pools) addChange(of *pool, comment string, tx *Tx) {
	c := &p.change
	addrs := of.addresses()
	for _, bucket := range c.buckets {
		if bucket < c.before {
			e := emptyBucket(of, bucket)
			tx.remove(p.Family, &e)
		}
		if bucket < of.size() {
			e := bucketElement(of, bucket, of.address(bucket, addrs))
			tx.add(p.Family, &e, "")
		}
	}
	if !of.sticky {
		return
	}
	for _, n := range c.gone {
		e := memberElement(of, n, netip.AddrPort{})
		tx.remove(p.Family, &e)
	}
	for _, m := range c.come {
		e := memberElement(of, m.number, m.addr)
		tx.add(p.Family, &e, comment)
	}
}

func sameSlice(a, b []*tracker.Endpoint) bool {
	return len(a) == len(b) && (len(a) == 0 || &a[0] == &b[0])
}
