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

// stickyOwner identifies a sticky pool beyond the life of this process. It is the comment of
// the pool's elements.
type stickyOwner string

// ownerOf identifies the Service's pool for a target. A name that no comment can hold is cut
// and ends in a part of its SHA-256 sum.
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

// adoptedPool is a sticky pool of a table that is being replaced. Its number and its
// endpoints' numbers stay, because the kernel remembers clients with them.
type adoptedPool struct {
	number  uint32
	members map[netip.AddrPort]uint16
}

// adopt makes the sticky pools of an earlier table available to their Services, and keeps
// their numbers from others. pools is nil if the clients are lost in any case.
//
// Clients may be remembered with numbers of pools that are gone, which are not known. New
// pools most likely get other numbers if these start anywhere.
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

// disown gives back the numbers of pools that no Service has taken over.
func (t *table) disown() {
	for _, p := range t.adopted {
		t.sticky.give(p.number &^ stickyMark)
	}
	t.adopted = nil
}
