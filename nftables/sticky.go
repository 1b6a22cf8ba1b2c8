//go:build linux

package nftables

import (
	"maps"
	"net/netip"
	"strings"

	"github.com/go-proxier/proxier/ruleset"
)

// stickyOwner names a sticky pool beyond the life of this process.
type stickyOwner struct {
	key    string
	target ruleset.Target
}

// comment is what the owner is found by in the kernel.
func (o stickyOwner) comment() string {
	if o.target == ruleset.ToLocal {
		return o.key + localSuffix
	}
	return o.key
}

const localSuffix = " local"

// parseStickyOwner is the reverse of comment.
func parseStickyOwner(comment string) stickyOwner {
	if key, ok := strings.CutSuffix(comment, localSuffix); ok {
		return stickyOwner{key, ruleset.ToLocal}
	}
	return stickyOwner{comment, ruleset.ToCluster}
}

// adoptedPool is a sticky pool of a table that is being replaced. Its number and
// its endpoints' numbers stay, since the kernel remembers clients by them.
type adoptedPool struct {
	number  uint32
	members map[netip.AddrPort]uint16
}

// adopt makes the sticky pools of an earlier table available to the Services
// that t is yet to be given, and keeps their numbers from others.
func (t *table) adopt(pools map[stickyOwner]*adoptedPool) {
	t.adopted = maps.Clone(pools)
	used := map[uint32]bool{}
	for _, p := range pools {
		n := p.number &^ stickyMark
		used[n] = true
		t.sticky.next = max(t.sticky.next, n)
	}
	for n := uint32(1); n < t.sticky.next; n++ {
		if !used[n] {
			t.sticky.give(n)
		}
	}
}

// disown gives back the numbers of pools that no Service took over.
func (t *table) disown() {
	for _, p := range t.adopted {
		t.sticky.give(p.number &^ stickyMark)
	}
	t.adopted = nil
}
