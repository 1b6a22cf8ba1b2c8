package layout

import (
	"slices"

	"github.com/go-proxier/proxier/internal/nft"
	"github.com/go-proxier/proxier/tracker"
)

// Types returns the types of a set's keys and data as nft reads them.
func (s Set) Types(f tracker.Family) string {
	daddr := "ip daddr"
	if f == tracker.IPv6 {
		daddr = "ip6 daddr"
	}
	const bucket = "typeof meta priority . numgen random mod 1 : "
	switch s {
	case Endpoints:
		return bucket + daddr + " . tcp dport"
	case UDPEndpoints:
		return bucket + daddr + " . udp dport"
	case SCTPEndpoints:
		return bucket + daddr + " . sctp dport"
	case StickyBuckets:
		return bucket + "meta priority"
	}
	sp := s.Spec(f)
	out := "type " + nft.TypeText(sp.KeyType)
	if sp.DataType != 0 {
		out += " : " + nft.TypeText(sp.DataType)
	}
	return out
}

// Flags returns the names of a set's flags, sorted.
func (s Set) Flags(f tracker.Family) (out []string) {
	for name, flag := range nft.SetFlags() {
		if s.Spec(f).Flags&flag != 0 {
			out = append(out, name)
		}
	}
	slices.Sort(out)
	return out
}
