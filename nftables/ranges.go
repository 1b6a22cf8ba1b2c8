//go:build linux

package nftables

import (
	"net/netip"
	"slices"

	"github.com/go-proxier/proxier/internal/inet"
	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/tracker"
)

// addrRange is the addresses from first to last.
type addrRange struct{ first, last netip.Addr }

func rangeOf(p netip.Prefix) addrRange {
	last := p.Addr().AsSlice()
	for i := p.Bits(); i < len(last)*8; i++ {
		last[i/8] |= 0x80 >> (i % 8)
	}
	addr, _ := netip.AddrFromSlice(last)
	return addrRange{p.Addr(), addr}
}

// merged returns the ranges of the family's prefixes, sorted. It joins ranges that overlap or
// touch, as an interval set requires.
func merged(prefixes []netip.Prefix, f tracker.Family) []addrRange {
	var ranges []addrRange
	for _, p := range inet.Prefixes(prefixes, f) {
		ranges = append(ranges, rangeOf(p))
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

// nodePortRanges returns the ranges of addresses at which NodePorts answer. An address must
// also be the node's own.
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

// setRanges makes an interval set hold the ranges. It does not rewrite existing ranges, because
// the kernel makes new elements of an interval set visible a moment after the rest of the
// transaction.
func (t *table) setRanges(s set, ranges []addrRange, w *writer) {
	have := t.ranges[s]
	for _, r := range have {
		if !slices.Contains(ranges, r) {
			w.removes(t.family, s).AddInterval(r.first.AsSlice(), r.end())
			w.structural = true
		}
	}
	for _, r := range ranges {
		if !slices.Contains(have, r) {
			w.adds(t.family, s).AddInterval(r.first.AsSlice(), r.end())
			w.structural = true
		}
	}
	t.ranges[s] = ranges
}

// end returns the first address after the range, or nil if the range ends with the last address.
func (r addrRange) end() []byte {
	if next := r.last.Next(); next.IsValid() {
		return next.AsSlice()
	}
	return nil
}

// bound is an element of an interval set: the first address of a range or, if end is set,
// the first address after it.
type bound struct {
	addr netip.Addr
	end  bool
}

func appendBound(bounds []bound, e kernelElement) []bound {
	if a, ok := netip.AddrFromSlice(e.key); ok {
		bounds = append(bounds, bound{a, e.intervalEnd})
	}
	return bounds
}

// rangesOf sorts the bounds and returns their ranges.
func rangesOf(bounds []bound) []addrRange {
	slices.SortFunc(bounds, func(a, b bound) int {
		if a.addr == b.addr && a.end != b.end { // one range ends where another begins
			if a.end {
				return -1
			}
			return 1
		}
		return a.addr.Compare(b.addr)
	})
	var out []addrRange
	open := false
	for _, b := range bounds {
		switch {
		case !b.end && !open:
			out = append(out, rangeOf(netip.PrefixFrom(b.addr, 0))) // to the last address
			open = true
		case b.end && open:
			out[len(out)-1].last = b.addr.Prev()
			open = false
		}
	}
	return out
}

// setNode sets the node and writes the interval sets, which depend on the node alone.
func (t *table) setNode(n *ruleset.Node, w *writer) {
	t.node = n
	t.setRanges(setNodePortIPs, nodePortRanges(n.NodePorts(t.family), t.family), w)
	t.setRanges(setServiceCIDRs, merged(n.ServiceCIDRs, t.family), w)
}

// needsRewrite reports whether the nodes differ in fields that rules of many chains, or the
// elements of every endpoint, depend on.
func needsRewrite(old, now *ruleset.Node) bool {
	return old.Info.Name != now.Info.Name || old.HashSeed != now.HashSeed ||
		old.LocalTraffic.Bridge != now.LocalTraffic.Bridge ||
		old.LocalTraffic.InterfacePrefix != now.LocalTraffic.InterfacePrefix ||
		!slices.Equal(old.LocalTraffic.CIDRs, now.LocalTraffic.CIDRs)
}
