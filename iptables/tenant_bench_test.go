//go:build linux

package iptables

import (
	"testing"

	"github.com/go-proxier/proxier/internal/testing/backendtest"
	"github.com/go-proxier/proxier/internal/testing/netlab"
	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/tracker"
)

// BenchmarkChangeBesideAttacker: see [backendtest.ChangeBesideAttacker].
func BenchmarkChangeBesideAttacker(b *testing.B) {
	for _, flavor := range []Flavor{NFT, Legacy} {
		b.Run("flavor="+string(flavor), func(b *testing.B) {
			needFlavor(b, flavor)
			backendtest.ChangeBesideAttacker(b, func(tb testing.TB) ruleset.Backend {
				c := testConfig(tb, flavor)
				c.NetNS, c.Families = netlab.NewHost(tb).File(), []tracker.Family{tracker.IPv4}
				backend, err := New(tb.Context(), c)
				if err != nil {
					tb.Fatal(err)
				}
				tb.Cleanup(func() { backend.Close() })
				return backend
			})
		})
	}
}
