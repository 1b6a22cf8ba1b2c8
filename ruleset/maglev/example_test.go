package maglev_test

import (
	"fmt"
	"net/netip"

	"github.com/go-proxier/proxier/ruleset/maglev"
)

// Two nodes choose the same endpoint for a connection, although they learned of the
// endpoints in another order.
func Example() {
	a := maglev.Member{Addr: netip.MustParseAddrPort("10.244.1.7:8080"), Weight: 1}
	b := maglev.Member{Addr: netip.MustParseAddrPort("10.244.2.4:8080"), Weight: 1}
	c := maglev.Member{Addr: netip.MustParseAddrPort("10.244.3.9:8080"), Weight: 2}

	client := netip.MustParseAddrPort("192.0.2.17:40001")
	const seed = 42
	var chosen []netip.AddrPort
	for _, members := range [][]maglev.Member{{a, b, c}, {c, a, b}} {
		t := maglev.Build(seed, maglev.SizeFor(len(members)), members)
		chosen = append(chosen, members[t.Find(maglev.HashAddrPort(seed, client))].Addr)
	}
	fmt.Println(chosen[0] == chosen[1])
	// Output: true
}
