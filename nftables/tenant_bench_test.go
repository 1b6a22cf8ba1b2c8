//go:build linux

package nftables

import (
	"testing"

	"github.com/go-proxier/proxier/internal/testing/backendtest"
	"github.com/go-proxier/proxier/internal/testing/netlab"
	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/tracker"
)

// BenchmarkChangeBesideAttacker: see [backendtest.ChangeBesideAttacker].
func BenchmarkChangeBesideAttacker(b *testing.B) {
	backendtest.ChangeBesideAttacker(b, func(tb testing.TB) ruleset.Backend {
		backend, err := New(tb.Context(), Config{NetNS: netlab.NewHost(tb).File(), Families: []tracker.Family{tracker.IPv4}})
		if err != nil {
			tb.Fatal(err)
		}
		tb.Cleanup(func() { backend.Close() })
		return backend
	})
}
