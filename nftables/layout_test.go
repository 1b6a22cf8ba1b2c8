//go:build linux

package nftables

import (
	"fmt"
	"testing"

	"github.com/go-proxier/proxier/internal/testing/netlab"
	"github.com/go-proxier/proxier/nftables/internal/layout"
)

// makeOlder gives the tables the version of layout 1, and a chain and a map with their names in
// layout 1. do runs a function in the network namespace.
func makeOlder(t *testing.T, do func(func() error) error, table string) {
	t.Helper()
	script := ""
	for _, family := range []string{"ip", "ip6"} {
		at := family + " " + table
		script += fmt.Sprintf("delete element %s layout { %#x }; add element %s layout { 1 };", at, layout.Version, at)
		script += fmt.Sprintf("add chain %s near; add map %s classes { type classid : verdict; };", at, at)
	}
	nft := netlab.Command(t, "nft", script)
	err := do(func() error {
		if out, err := nft.CombinedOutput(); err != nil {
			return fmt.Errorf("%w: %s", err, out)
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
}
