package nftables

import (
	"net/netip"
	"slices"

	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/tracker"
)

// addrRange is the addresses from first to last.
type addrRange struct{ first, last netip.Addr }

func rangeOf(p netip.Prefix) addrRange {
	p = p.Masked()
	last := p.Addr().AsSlice()
	for i := p.Bits(); i < len(last)*8; i++ {
		last[i/8] |= 0x80 >> (i % 8)
	}
	addr, _ := netip.AddrFromSlice(last)
	return addrRange{p.Addr(), addr}
}

// merged returns the ranges of the prefixes of the family, sorted, and with
// those that overlap or touch joined: an interval set takes no others.
func merged(prefixes []netip.Prefix, f tracker.Family) []addrRange {
	var ranges []addrRange
	for _, p := range prefixes {
		if p.IsValid() && tracker.FamilyOf(p.Addr()) == f {
			ranges = append(ranges, rangeOf(p))
		}
	}
	slices.SortFunc(ranges, func(a, b addrRange) int { return a.first.Compare(b.first) })
	var out []addrRange
	for _, r := range ranges {
		if n := len(out); n > 0 && !out[n-1].last.Next().Less(r.first) {
			if out[n-1].last.Less(r.last) {
				out[n-1].last = r.last
			}
			continue
		}
		out = append(out, r)
	}
	return out
}

// nodePortRanges returns the addresses at which NodePorts answer, provided they
// are the node's own.
func nodePortRanges(n ruleset.NodePorts, f tracker.Family) []addrRange {
	loopback, all := netip.MustParsePrefix("127.0.0.0/8"), netip.MustParsePrefix("0.0.0.0/0")
	if f == tracker.IPv6 {
		loopback, all = netip.MustParsePrefix("::1/128"), netip.MustParsePrefix("::/0")
	}
	ranges := merged(n.Prefixes, f)
	if n.All {
		ranges = []addrRange{rangeOf(all)}
	}
	cut := rangeOf(loopback)
	var out []addrRange
	for _, r := range ranges {
		if r.last.Less(cut.first) || cut.last.Less(r.first) {
			out = append(out, r)
			continue
		}
		if r.first.Less(cut.first) {
			out = append(out, addrRange{r.first, cut.first.Prev()})
		}
		if cut.last.Less(r.last) {
			out = append(out, addrRange{cut.last.Next(), r.last})
		}
	}
	return out
}

// addRanges adds ranges to an interval set.
func (w *writer) addRanges(t *table, s set, ranges []addrRange) {
	for _, r := range ranges {
		var end []byte
		if next := r.last.Next(); next.IsValid() {
			end = next.AsSlice()
		}
		w.adds(t, s).AddInterval(r.first.AsSlice(), end)
	}
}

// setNode brings what depends on the node as a whole up to date.
func (t *table) setNode(n *ruleset.Node, w *writer) {
	old := t.node
	t.node = n
	if !sameNodePorts(old.NodePorts(t.family), n.NodePorts(t.family)) {
		w.emptySet(t, setNodePortIPs)
		w.addRanges(t, setNodePortIPs, nodePortRanges(n.NodePorts(t.family), t.family))
	}
	if !slices.Equal(old.ServiceCIDRs, n.ServiceCIDRs) {
		w.emptySet(t, setServiceCIDRs)
		w.addRanges(t, setServiceCIDRs, merged(n.ServiceCIDRs, t.family))
	}
}

func sameNodePorts(a, b ruleset.NodePorts) bool {
	return a.All == b.All && slices.Equal(a.Prefixes, b.Prefixes)
}

// needsRewrite reports whether what differs between the nodes is part of the
// rules of many chains or of what was decided for every endpoint.
func needsRewrite(old, now *ruleset.Node) bool {
	return old.Info.Name != now.Info.Name ||
		old.LocalTraffic.Bridge != now.LocalTraffic.Bridge ||
		old.LocalTraffic.InterfacePrefix != now.LocalTraffic.InterfacePrefix ||
		!slices.Equal(old.LocalTraffic.CIDRs, now.LocalTraffic.CIDRs)
}
