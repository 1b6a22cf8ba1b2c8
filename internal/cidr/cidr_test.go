package cidr

import (
	"math/rand/v2"
	"net/netip"
	"slices"
	"testing"
)

// TestListsContainTheSameAddresses compares random lists with their results, address by address.
func TestListsContainTheSameAddresses(t *testing.T) {
	merged := 0
	for seed := range uint64(2000) {
		r := rand.New(rand.NewPCG(seed, 0))
		random := func() netip.Addr {
			if seed%2 == 0 {
				return netip.AddrFrom4([4]byte{10, 0, 0, byte(r.IntN(64))})
			}
			return netip.AddrFrom16([16]byte{0: 0xfd, 15: byte(r.IntN(64))})
		}
		var in []netip.Prefix
		for range r.IntN(30) {
			a := random()
			in = append(in, netip.PrefixFrom(a, a.BitLen()-r.IntN(6)))
		}
		if r.IntN(10) == 0 {
			in = append(in, netip.Prefix{})
		}
		before := slices.Clone(in)
		small, least := Reduce(in), Merge(in)
		less := in[len(in)/2:]
		rest := Subtract(in, less)
		if !slices.Equal(before, in) {
			t.Fatal("the list changed")
		}
		if !reduced(rest) || !reduced(small) || !reduced(least) || !slices.Equal(Reduce(small), small) || !slices.Equal(Merge(least), least) {
			t.Fatalf("%v: %v, %v", in, small, least)
		}
		if len(least) > len(small) {
			t.Fatalf("%v: %d merged from %d", in, len(least), len(small))
		}
		if len(least) < len(small) {
			merged++
		}
		for range 100 {
			a := random()
			contains := func(p netip.Prefix) bool { return p.Contains(a) }
			if got := slices.ContainsFunc(rest, contains); got != (slices.ContainsFunc(in, contains) && !slices.ContainsFunc(less, contains)) {
				t.Fatalf("%v without %v: %v: contains %v: %t", in, less, rest, a, got)
			}
			want := slices.ContainsFunc(in, func(p netip.Prefix) bool { return p.Contains(a) })
			if Contain(small, a) != want || Contain(least, a) != want {
				t.Fatalf("%v: %v: want %t, reduced %v, merged %v", in, a, want, small, least)
			}
		}
		// Merged ranges are as few as they can be: no two have the same length and parent.
		for i := 1; i < len(least); i++ {
			a, b := least[i-1], least[i]
			if a.Bits() == b.Bits() && netip.PrefixFrom(a.Addr(), a.Bits()-1).Masked() == netip.PrefixFrom(b.Addr(), b.Bits()-1).Masked() {
				t.Fatalf("%v and %v are not merged", a, b)
			}
		}
	}
	if merged < 100 {
		t.Errorf("only %d lists were merged", merged)
	}
}
