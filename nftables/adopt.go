//go:build linux

package nftables

import (
	"crypto/sha256"
	"encoding/hex"
	"maps"
	"math/rand/v2"
	"net/netip"

	"github.com/go-proxier/proxier/nftables/internal/nlbatch"
	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/tracker"
)

// stickyOwner identifies a sticky pool to later processes. It is the comment of the pool's
// elements.
type stickyOwner string

// ownerOf returns the owner of the Service's pool for a target. A name that does not fit into a
// comment is cut and ends in a part of its SHA-256 sum.
func ownerOf(k tracker.Key, target ruleset.Target) stickyOwner {
	name := k.String()
	if target == ruleset.ToLocal {
		name += " local"
	}
	if short := nlbatch.Printable(name); short != name {
		sum := sha256.Sum256([]byte(name))
		suffix := "~" + hex.EncodeToString(sum[:10])
		return stickyOwner(short[:min(len(short), nlbatch.MaxComment-len(suffix))] + suffix)
	}
	return stickyOwner(name)
}

// adoptedPool is a sticky pool of a table that is being replaced. The pool and its endpoints
// keep their numbers, because the kernel remembers clients by these numbers.
type adoptedPool struct {
	number  uint32
	members map[netip.AddrPort]uint16
}

// adopt makes the sticky pools of an earlier table available to their Services, and reserves
// their numbers. pools is nil if the clients are lost in any case.
//
// The kernel may remember clients by numbers of pools that are gone, and adopt does not know
// these numbers. So new numbers start at a random one, which makes a clash unlikely.
func (t *table) adopt(pools map[stickyOwner]*adoptedPool) {
	if pools == nil {
		return
	}
	t.adopted = maps.Clone(pools)
	t.sticky.start = rand.N(t.sticky.max)
	t.sticky.kept = map[uint32]bool{}
	for _, p := range pools {
		t.sticky.kept[p.number&^stickyMark] = true
	}
}

// releaseAdopted gives back the numbers of adopted pools that no Service has taken over.
func (t *table) releaseAdopted() {
	for _, p := range t.adopted {
		t.sticky.give(p.number &^ stickyMark)
	}
	t.adopted = nil
}
