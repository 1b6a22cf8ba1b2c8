package netlab_test

import (
	"fmt"
	"net/netip"

	"github.com/go-proxier/proxier/internal/testing/netlab"
)

// Two hosts with a link. One of them listens.
func Example() {
	lab := netlab.New()
	defer lab.Close()
	a, b := lab.Host("a"), lab.Host("b")
	lab.Link(a, "eth0", b, "eth0")
	a.Addrs("eth0", "192.0.2.1/24")
	b.Addrs("eth0", "192.0.2.2/24")
	b.Greet(netip.MustParseAddrPort("192.0.2.2:80"))
	if lab.Err != nil {
		fmt.Println("cannot create namespaces:", lab.Err)
	}
	// Output:
}
