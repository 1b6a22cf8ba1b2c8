// Package cidr has operations on lists of address ranges.
package cidr

import (
	"cmp"
	"net/netip"
	"slices"
)

// Reduce returns the valid prefixes of a list, masked and sorted, without those that another one
// contains. It returns the list itself if that is so already.
func Reduce(in []netip.Prefix) []netip.Prefix {
	if len(in) != 0 && reduced(in) {
		return in
	}
	out := make([]netip.Prefix, 0, len(in))
	for _, p := range in {
		if p.IsValid() {
			out = append(out, p.Masked())
		}
	}
	slices.SortFunc(out, compare)
	// Prefixes are nested or disjoint, and a prefix sorts right before those that it
	// contains. So only the last prefix kept can contain the next.
	kept := out[:0]
	for _, p := range out {
		if n := len(kept); n > 0 && kept[n-1].Overlaps(p) {
			continue
		}
		kept = append(kept, p)
	}
	return slices.Clip(kept)
}

// reduced reports whether Reduce would change nothing.
func reduced(list []netip.Prefix) bool {
	for i, p := range list {
		if !p.IsValid() || p != p.Masked() || i > 0 && (compare(list[i-1], p) >= 0 || list[i-1].Overlaps(p)) {
			return false
		}
	}
	return true
}

// compare orders prefixes by address, and then the wider one first.
func compare(a, b netip.Prefix) int {
	return cmp.Or(a.Addr().Compare(b.Addr()), cmp.Compare(a.Bits(), b.Bits()))
}

// Merge returns the result of Reduce with each two prefixes that are the halves of a third
// replaced by it.
func Merge(in []netip.Prefix) []netip.Prefix {
	var out []netip.Prefix
	for _, p := range Reduce(in) {
		out = append(out, p)
		for n := len(out); n > 1; n = len(out) {
			a, b := out[n-2], out[n-1]
			both := netip.PrefixFrom(a.Addr(), a.Bits()-1).Masked()
			if a.Bits() != b.Bits() || both.Addr() != a.Addr() || !both.Contains(b.Addr()) {
				break
			}
			out[n-2], out = both, out[:n-1]
		}
	}
	return slices.Clip(out)
}

// Subtract returns the prefixes of the addresses in list that are not in less. Invalid prefixes are
// ignored.
func Subtract(list, less []netip.Prefix) (out []netip.Prefix) {
	for _, p := range Reduce(list) {
		out = appendWithout(out, p, less)
	}
	return out
}

func appendWithout(out []netip.Prefix, p netip.Prefix, less []netip.Prefix) []netip.Prefix {
	less = slices.DeleteFunc(slices.Clone(less), func(l netip.Prefix) bool { return !p.Overlaps(l) })
	if len(less) == 0 {
		return append(out, p)
	}
	if slices.ContainsFunc(less, func(l netip.Prefix) bool { return l.Bits() <= p.Bits() }) {
		return out
	}
	low := netip.PrefixFrom(p.Addr(), p.Bits()+1)
	upper := p.Addr().AsSlice()
	upper[p.Bits()/8] |= 0x80 >> (p.Bits() % 8)
	high, _ := netip.AddrFromSlice(upper)
	return appendWithout(appendWithout(out, low, less), netip.PrefixFrom(high, p.Bits()+1), less)
}

// Contain reports whether a is in one of the prefixes of a result of Reduce or Merge.
func Contain(sorted []netip.Prefix, a netip.Addr) bool {
	i, _ := slices.BinarySearchFunc(sorted, a, func(p netip.Prefix, a netip.Addr) int { return p.Addr().Compare(a) })
	return i < len(sorted) && sorted[i].Contains(a) || i > 0 && sorted[i-1].Contains(a)
}
