package ruleset

import (
	"cmp"
	"net/netip"
	"slices"
)

// reducePrefixes returns the prefixes of in, masked and sorted, without invalid ones,
// duplicates and those contained in another. It does not modify in.
func reducePrefixes(in []netip.Prefix) []netip.Prefix {
	out := make([]netip.Prefix, 0, len(in))
	for _, p := range in {
		if p.IsValid() {
			out = append(out, p.Masked())
		}
	}
	slices.SortFunc(out, comparePrefixes)
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

// comparePrefixes orders prefixes by address, and then the wider one first.
func comparePrefixes(a, b netip.Prefix) int {
	return cmp.Or(a.Addr().Compare(b.Addr()), cmp.Compare(a.Bits(), b.Bits()))
}

// containsAddr reports whether a is in one of the prefixes.
func containsAddr(ps []netip.Prefix, a netip.Addr) bool {
	for _, p := range ps {
		if p.Contains(a) {
			return true
		}
	}
	return false
}

// single returns the prefix that holds only a.
func single(a netip.Addr) netip.Prefix { return netip.PrefixFrom(a, a.BitLen()) }
