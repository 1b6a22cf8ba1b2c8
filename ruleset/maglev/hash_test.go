package maglev

import (
	"math"
	"net/netip"
	"testing"
)

// TestHashesMatchKernel compares the hashes with known values, which package nftables
// has found equal to the kernel's.
func TestHashesMatchKernel(t *testing.T) {
	for _, c := range []struct {
		seed           uint64
		source         string
		addr, addrPort uint32
	}{
		{1, "192.0.2.1:443", 3677493868, 2091723172},
		{0, "[::ffff:192.0.2.1]:443", 3677493868, 2091723172},
		{1 << 32, "192.0.2.1:443", 3677493868, 2091723172},
		{42, "192.0.2.1:443", 4204108750, 3278935240},
		{1, "[2001:db8::1]:443", 508935377, 2844546234},
		{1, "[2001:db8::1]:444", 508935377, 1422538833},
	} {
		source := netip.MustParseAddrPort(c.source)
		if a, ap := HashAddr(c.seed, source.Addr()), HashAddrPort(c.seed, source); a != c.addr || ap != c.addrPort {
			t.Errorf("%s with seed %d: %d and with the port %d, were %d and %d", source, c.seed, a, ap, c.addr, c.addrPort)
		}
	}
}

// TestHashIsEven distributes neighboring sources over a table.
func TestHashIsEven(t *testing.T) {
	const n, sources = 5, 20000
	tab := Build(1, 1021, members(n))
	var count [n]int
	for i := range sources {
		count[tab.Find(HashAddrPort(1, netip.AddrPortFrom(netip.MustParseAddr("192.0.2.1"), uint16(i))))]++
	}
	for _, c := range count {
		if math.Abs(float64(c)-sources/n) > sources/n/20 {
			t.Errorf("uneven: %v", count)
		}
	}
}
