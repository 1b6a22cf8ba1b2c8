package model

import (
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"maps"
	"math/rand/v2"
	"net/netip"

	"github.com/go-proxier/proxier/nftables/internal/layout"
	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/tracker"
)

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
	if short := layout.Printable(name); short != name {
		sum := sha256.Sum256([]byte(name))
		suffix := "~" + hex.EncodeToString(sum[:10])
		return StickyOwner(short[:min(len(short), layout.MaxComment-len(suffix))] + suffix)
	}
	return StickyOwner(name)
}

// AdoptedPool is a sticky pool of a table that is being replaced. The pool and its endpoints
// keep their numbers, because the kernel remembers clients by these numbers.
type AdoptedPool struct {
	number  uint32
	members map[netip.AddrPort]uint16
}

// Adopt makes the sticky pools of an earlier table available to their Services, and reserves
// their numbers. a is nil if the clients are lost in any case.
//
// The kernel may remember clients by numbers of pools that are gone, and Adopt does not know
// these numbers. So new numbers start at a random one, which makes a clash unlikely.
func (p *pools) Adopt(a *Adopted) {
	if a == nil {
		return
	}
	p.adopted.now = maps.Clone(a.Pools)
	p.sticky.start = rand.N(p.sticky.max)
	p.sticky.kept = map[uint32]bool{}
	for _, a := range a.Pools {
		p.sticky.kept[a.number&^layout.StickyMark] = true
	}
}

// ReleaseAdopted gives back the numbers of adopted pools that no Service has taken over.
func (p *pools) ReleaseAdopted() {
	for _, a := range p.adopted.now {
		p.sticky.give(a.number &^ layout.StickyMark)
	}
	p.adopted.now = nil
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
