package model

import (
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"maps"
	"math/rand/v2"
	"net/netip"

	"github.com/go-proxier/proxier/internal/nft"
	"github.com/go-proxier/proxier/nftables/internal/layout"
	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/ruleset/maglev"
	"github.com/go-proxier/proxier/tracker"
)

// pools is the department of pools: of their numbers and the elements of their endpoints.
type pools struct {
	common        *common
	plain, sticky numbers
	// adopted holds the sticky pools of an earlier table that no Service has taken over.
	adopted map[StickyOwner]*AdoptedPool
	change  poolChange // a buffer
}

// allocatePools gives now, which replaces old, the pools that w wants: those of old that are of the right kind,
// and new ones as long as there are numbers.
func (p *pools) allocatePools(old, now *service, w *wanted) {
	for _, target := range targets {
		if !w.pools[target].used {
			continue
		}
		is := p.allocatePool(old.pools[target], w, target)
		now.pools[target] = is
		now.lacksPool = now.lacksPool || is == nil
		now.lacksAffinity = now.lacksAffinity || is != nil && is.sticky != (w.affinity != 0)
	}
}

// allocatePool returns old if that is of the right kind, or a new pool. If there is no number for a sticky
// pool, the pool is of the other kind. Without a number for any pool, allocatePool returns nil.
func (p *pools) allocatePool(old *pool, w *wanted, target ruleset.Target) *pool {
	if old != nil && old.sticky == (w.affinity != 0) {
		return old
	}
	if w.affinity != 0 {
		if p := p.newSticky(ownerOf(w.key, target)); p != nil {
			return p
		}
		if old != nil {
			return old
		}
	}
	n, ok := p.plain.allocateNumber()
	if !ok {
		return nil
	}
	return &pool{number: n, protocol: w.key.Protocol}
}

// newSticky returns a new sticky pool, or the one that the owner had in an earlier table. It returns nil
// if there is no number left.
func (p *pools) newSticky(owner StickyOwner) *pool {
	if a := p.adopted[owner]; a != nil {
		delete(p.adopted, owner)
		return &pool{sticky: true, number: a.number, adopted: a.members}
	}
	n, ok := p.sticky.allocateNumber()
	if !ok {
		return nil
	}
	return &pool{sticky: true, number: layout.StickyMark | n}
}

// releasePools gives back the numbers of the pools that a Service lost.
func (p *pools) releasePools(old, now *service) {
	for _, target := range targets {
		switch was := old.pools[target]; {
		case was == nil || was == now.pools[target]:
		case was.sticky:
			p.sticky.releaseNumber(was.number &^ layout.StickyMark)
		default:
			p.plain.releaseNumber(was.number)
		}
	}
}

// planPool adds the buckets and the numbered endpoints by which a Service's pool for a target changes. was and
// is are the same pool unless its kind changes.
func (p *pools) planPool(was, is *pool, before, after *wanted, target ruleset.Target, tx *Tx) {
	old, now := before.pools[target].endpoints, &after.pools[target]
	if was != nil && was != is {
		was.set(old, nil, distribution{}, nil, &p.change)
		p.addChange(was, "", tx)
	}
	if is == nil {
		return
	}
	switch {
	case was != is:
		old = nil
	case now.how == is.distribution && sameSlice(old, now.endpoints):
		return
	}
	is.set(old, now.endpoints, now.how, func() *maglev.Table { return after.hashed(target, p.common.node.HashSeed) }, &p.change)
	comment := ""
	if is.sticky && len(p.change.come) != 0 {
		comment = string(ownerOf(after.key, target))
	}
	p.addChange(is, comment, tx)
}

// addChange adds p.change, the pool's change. comment is for the endpoints of a sticky pool.
func (p *pools) addChange(of *pool, comment string, tx *Tx) {
	c := &p.change
	addrs := of.addresses()
	for _, bucket := range c.buckets {
		if bucket < c.before {
			e := emptyBucket(of, bucket)
			tx.remove(p.common.family, &e)
		}
		if bucket < of.size() {
			e := bucketElement(of, bucket, of.address(bucket, addrs))
			tx.add(p.common.family, &e, "")
		}
	}
	if !of.sticky {
		return
	}
	for _, n := range c.gone {
		e := memberElement(of, n, netip.AddrPort{})
		tx.remove(p.common.family, &e)
	}
	for _, m := range c.come {
		e := memberElement(of, m.number, m.addr)
		tx.add(p.common.family, &e, comment)
	}
}

func sameSlice(a, b []*tracker.Endpoint) bool {
	return len(a) == len(b) && (len(a) == 0 || &a[0] == &b[0])
}

// emptyBucket returns the element of a pool's bucket without its data.
func emptyBucket(p *pool, bucket int) layout.Element {
	if p.sticky {
		return layout.Element{Set: layout.StickyBuckets, Key: word(p.number << layout.StickyShift).Word(uint32(bucket))}
	}
	return layout.Element{Set: layout.EndpointsOf(p.protocol), Key: word(p.number).Word(uint32(bucket))}
}

func bucketElement(p *pool, bucket int, addr netip.AddrPort) layout.Element {
	e := emptyBucket(p, bucket)
	if p.sticky {
		e.Data = word(p.number<<layout.StickyShift | uint32(p.member(bucket)))
	} else {
		e.Data = ip(addr.Addr()).Port(addr.Port())
	}
	return e
}

// memberElement returns the element of a numbered endpoint of a sticky pool.
func memberElement(p *pool, number uint16, addr netip.AddrPort) layout.Element {
	return layout.Element{
		Set: layout.StickyEndpoints, Key: word(p.number<<layout.StickyShift | uint32(number)),
		Data: ip(addr.Addr()).Port(addr.Port()),
	}
}

// StickyOwner identifies a sticky pool to later processes. It is the comment of the pool's
// elements.
type StickyOwner string

// ownerOf returns the owner of the Service's pool for a target. A name that does not fit into a
// comment is cut and ends in a part of its SHA-256 sum.
func ownerOf(k tracker.Key, target ruleset.Target) StickyOwner {
	name := k.String()
	if target == ruleset.TargetLocal {
		name += " local"
	}
	if short := nft.Printable(name); short != name {
		sum := sha256.Sum256([]byte(name))
		suffix := "~" + hex.EncodeToString(sum[:10])
		return StickyOwner(short[:min(len(short), nft.MaxComment-len(suffix))] + suffix)
	}
	return StickyOwner(name)
}

// AdoptedPool is a sticky pool of a table that is being replaced. The pool and its endpoints
// keep their numbers, because the kernel remembers clients by these numbers.
type AdoptedPool struct {
	number  uint32
	members map[netip.AddrPort]uint16
}

// Adopt makes the sticky pools of an earlier table available to their Services, and reserves their numbers. a is nil
// if the clients are lost in any case. Numbers of other pools that the kernel may remember are unknown, so new
// numbers start at a random one.
func (p *pools) Adopt(a *Adopted) {
	if a == nil {
		return
	}
	p.adopted = maps.Clone(a.Pools)
	p.sticky.start = rand.N(p.sticky.max)
	p.sticky.kept = map[uint32]bool{}
	for _, a := range a.Pools {
		p.sticky.kept[a.number&^layout.StickyMark] = true
	}
}

// ReleaseAdopted gives back the numbers of adopted pools that no Service has taken over.
func (p *pools) ReleaseAdopted() {
	for _, a := range p.adopted {
		p.sticky.releaseNumber(a.number &^ layout.StickyMark)
	}
	p.adopted = nil
}

// Adopted holds the sticky pools of a table in the kernel.
type Adopted struct {
	Pools   map[StickyOwner]*AdoptedPool
	numbers map[uint32]bool
}

// NewAdopted returns an empty Adopted.
func NewAdopted() *Adopted {
	return &Adopted{Pools: map[StickyOwner]*AdoptedPool{}, numbers: map[uint32]bool{}}
}

// Add adds an element of the map sticky-endpoints. It ignores elements that no version of this
// package writes.
func (a *Adopted) Add(key, data []byte, comment string) {
	addr, ok := layout.ParseAddrPort(data)
	if !ok || len(key) != 4 || comment == "" {
		return
	}
	number := binary.NativeEndian.Uint32(key)
	if number&layout.DispatchMark == 0 {
		return
	}
	owner := StickyOwner(comment)
	p, pool := a.Pools[owner], number>>layout.StickyShift
	if p == nil {
		if a.numbers[pool] {
			return // the table was altered: two owners have the same number
		}
		p = &AdoptedPool{number: pool, members: map[netip.AddrPort]uint16{}}
		a.Pools[owner], a.numbers[pool] = p, true
	}
	if p.number == pool {
		p.members[addr] = uint16(number)
	}
}
