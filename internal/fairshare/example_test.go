package fairshare_test

import (
	"fmt"
	"net/netip"

	"github.com/go-proxier/proxier/internal/fairshare"
)

// One client opens connections until the table is full, and goes on.
func Example() {
	open := fairshare.New[string](4)
	open.Add("victim 1", fairshare.Holder{Namespace: "shop", Service: "web", Client: netip.MustParseAddr("192.0.2.1")})
	for i := range 5 {
		conn := fmt.Sprint("flood ", i+1)
		if ended, full := open.Add(conn, fairshare.Holder{Namespace: "shop", Service: "web", Client: netip.MustParseAddr("192.0.2.9")}); full {
			fmt.Println(conn, "ends", ended)
		}
	}
	// Output:
	// flood 4 ends flood 1
	// flood 5 ends flood 2
}
