package model

import (
	"net/netip"
	"slices"

	"github.com/go-proxier/proxier/internal/inet"
	"github.com/go-proxier/proxier/internal/nft"
	"github.com/go-proxier/proxier/nftables/internal/layout"
	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/tracker"
)

// Range is the addresses from First to Last.
type Range struct{ First, Last netip.Addr }

// String returns the range as nft writes it.
func (r Range) String() string {
	if r.First == r.Last {
		return r.First.String()
	}
	for bits := range r.First.BitLen() {
		if p := netip.PrefixFrom(r.First, bits); p.Masked() == p && rangeOf(p) == r {
			return p.String()
		}
	}
	return r.First.String() + "-" + r.Last.String()
}

func rangeOf(p netip.Prefix) Range {
	last := p.Addr().AsSlice()
	for i := p.Bits(); i < len(last)*8; i++ {
		last[i/8] |= 0x80 >> (i % 8)
	}
	addr, _ := netip.AddrFromSlice(last)
	return Range{p.Addr(), addr}
}

// merged returns the ranges of prefixes of one family, sorted. It joins ranges that overlap or touch, as an
// interval set requires.
func merged(prefixes []netip.Prefix) []Range {
	var ranges []Range
	for _, p := range prefixes {
		ranges = append(ranges, rangeOf(p.Masked()))
	}
	slices.SortFunc(ranges, func(a, b Range) int { return a.First.Compare(b.First) })
	var out []Range
	for _, r := range ranges {
		if n := len(out); n > 0 && !out[n-1].Last.Next().Less(r.First) {
			if out[n-1].Last.Less(r.Last) {
				out[n-1].Last = r.Last
			}
			continue
		}
		out = append(out, r)
	}
	return out
}

// nodePortRanges returns the ranges of addresses at which NodePorts answer. An address must
// also be the node's own.
func nodePortRanges(n ruleset.NodePorts, f tracker.Family) []Range {
	loopback, all := netip.MustParsePrefix("127.0.0.0/8"), netip.MustParsePrefix("0.0.0.0/0")
	if f == tracker.IPv6 {
		loopback, all = netip.MustParsePrefix("::1/128"), netip.MustParsePrefix("::/0")
	}
	ranges := merged(inet.Prefixes(n.Prefixes, f))
	if n.All {
		ranges = []Range{rangeOf(all)}
	}
	cut := rangeOf(loopback)
	var out []Range
	for _, r := range ranges {
		if r.Last.Less(cut.First) || cut.Last.Less(r.First) {
			out = append(out, r)
			continue
		}
		if r.First.Less(cut.First) {
			out = append(out, Range{r.First, cut.First.Prev()})
		}
		if cut.Last.Less(r.Last) {
			out = append(out, Range{cut.Last.Next(), r.Last})
		}
	}
	return out
}

// intervals is the department of the interval sets and of the interfaces of the fast path.
type intervals struct {
	common *common
	ranges map[layout.Set][]Range
	// interfaces holds the interfaces of the fast path by name, with their indices. It is nil
	// before the first KeepInterfaces.
	interfaces map[string]int
}

// SetRanges makes an interval set hold the ranges. It does not rewrite existing ranges: the kernel makes new elements
// visible a moment after the rest of the transaction.
func (i *intervals) SetRanges(s layout.Set, ranges []Range, tx *Tx) {
	have := i.ranges[s]
	for _, r := range have {
		if !slices.Contains(ranges, r) {
			r.edit(i.common.family, s, true, tx)
		}
	}
	for _, r := range ranges {
		if !slices.Contains(have, r) {
			r.edit(i.common.family, s, false, tx)
		}
	}
	i.ranges[s] = ranges
}

// KeepRanges makes an interval set start with the ranges that it has in the kernel.
func (i *intervals) KeepRanges(s layout.Set, ranges []Range) { i.ranges[s] = ranges }

// edit adds the range to an interval set or deletes it. There is no end if it ends with the last address.
func (r Range) edit(f tracker.Family, s layout.Set, deletion bool, tx *Tx) {
	e := tx.begin(f, s, deletion)
	e.AddInterval(r.First.AsSlice(), r.Last.Next().AsSlice())
	tx.end(e)
}

// Bound is an element of an interval set: the first address of a range or, if End is set,
// the first address after it.
type Bound struct {
	Addr netip.Addr
	End  bool
}

// RangesOf sorts the bounds and returns their ranges.
func RangesOf(bounds []Bound) []Range {
	slices.SortFunc(bounds, func(a, b Bound) int {
		if a.Addr == b.Addr && a.End != b.End { // one range ends where another begins
			if a.End {
				return -1
			}
			return 1
		}
		return a.Addr.Compare(b.Addr)
	})
	var out []Range
	open := false
	for _, b := range bounds {
		switch {
		case !b.End && !open:
			out = append(out, rangeOf(netip.PrefixFrom(b.Addr, 0))) // to the last address
			open = true
		case b.End && open:
			out[len(out)-1].Last = b.Addr.Prev()
			open = false
		}
	}
	return out
}

func (i *intervals) setNodePortIPs(tx *Tx) {
	i.SetRanges(layout.NodePortIPs, nodePortRanges(i.common.node.NodePorts(i.common.family), i.common.family), tx)
}

// OwnNodePorts reports whether NodePorts are at addresses in the Node object alone, as for "primary".
func OwnNodePorts(n *ruleset.Node, f tracker.Family) bool {
	p := n.NodePorts(f)
	return !p.All && !slices.ContainsFunc(p.Prefixes, func(p netip.Prefix) bool {
		return !p.IsSingleIP() || !slices.Contains(n.Info.Addresses, p.Addr())
	})
}

func (i *intervals) setServiceCIDRs(tx *Tx) {
	i.SetRanges(layout.ServiceCIDRs, merged(inet.Prefixes(i.common.node.ServiceCIDRs, i.common.family)), tx)
}

// SetInterfaces makes the set of the fast path's interfaces hold the interfaces, by name with their
// indices. The caller changes the flowtable's devices.
func (i *intervals) SetInterfaces(links map[string]int, tx *Tx) {
	edit := func(names []string, deletion bool) {
		for _, name := range names {
			e := tx.begin(i.common.family, layout.FastPathInterfaces, deletion)
			e.Add(nft.InterfaceName(name), nil, "")
			tx.end(e)
		}
	}
	edit(Missing(i.interfaces, links), true)
	edit(Missing(links, i.interfaces), false)
}

// Interfaces returns the interfaces of the fast path by name, with their indices. It is nil before
// the first KeepInterfaces.
func (i *intervals) Interfaces() map[string]int { return i.interfaces }

// KeepInterfaces records that the interfaces of SetInterfaces are in effect.
func (t *Table) KeepInterfaces(links map[string]int) {
	t.Intervals.interfaces = links
	t.Room.setCount(layout.FastPathInterfaces, len(links))
}

// Missing returns the keys of a that are missing from b, sorted.
func Missing[A, B any](a map[string]A, b map[string]B) []string {
	var out []string
	for name := range a {
		if _, ok := b[name]; !ok {
			out = append(out, name)
		}
	}
	slices.Sort(out)
	return out
}

// Ranges returns the contents of an interval set.
func (i *intervals) Ranges(s layout.Set) []Range { return i.ranges[s] }
