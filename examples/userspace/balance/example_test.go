package balance_test

import (
	"fmt"
	"net/netip"
	"time"

	"github.com/go-proxier/proxier/examples/userspace/balance"
	"github.com/go-proxier/proxier/tracker"
)

// The pool has a large endpoint and a small one. The second Balancer adds client affinity.
func Example() {
	pool := []*tracker.Endpoint{
		{Addr: netip.MustParseAddrPort("10.0.0.1:80"), Weight: 3},
		{Addr: netip.MustParseAddrPort("10.0.0.2:80"), Weight: 1},
	}
	client := netip.MustParseAddrPort("192.0.2.1:40001")
	plain := &balance.WeightedRoundRobin{}
	sticky := balance.NewAffinity(time.Hour, 0).Wrap(plain)
	for range 4 {
		fmt.Println(plain.Pick(pool, client))
	}
	for range 2 {
		fmt.Println("sticky:", sticky.Pick(pool, client))
	}
	// Output:
	// 10.0.0.1:80
	// 10.0.0.1:80
	// 10.0.0.2:80
	// 10.0.0.1:80
	// sticky: 10.0.0.1:80
	// sticky: 10.0.0.1:80
}
