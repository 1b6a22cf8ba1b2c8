package netlab_test

import (
	"fmt"
	"net/netip"

	"github.com/go-proxier/proxier/internal/testing/netlab"
)

// Two hosts with a link. One of them listens.
func Example() {
	err := func() error {
		lab := netlab.New()
		defer lab.Close()
		a, err := lab.Host("a")
		if err != nil {
			return err
		}
		b, err := lab.Host("b")
		if err != nil {
			return err
		}
		if err := lab.Link(a, "eth0", b, "eth0"); err != nil {
			return err
		}
		if err := a.AddAddr("eth0", netip.MustParsePrefix("192.0.2.1/24")); err != nil {
			return err
		}
		if err := b.AddAddr("eth0", netip.MustParsePrefix("192.0.2.2/24")); err != nil {
			return err
		}
		_, err = b.Listen("tcp", "192.0.2.2:80")
		return err
	}()
	if err != nil {
		fmt.Println("cannot create namespaces:", err)
	}
	// Output:
}
