//go:build linux

package nftables

import (
	"testing"

	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/ruleset/conformance"
)

// TestConformance sends packets through everything the ruleset can say.
func TestConformance(t *testing.T) {
	conformance.Run(t, conformance.Options{New: newForWorld})
}

func newForWorld(tb testing.TB, env conformance.Env) ruleset.Backend {
	b, err := New(tb.Context(), Config{NetNS: env.NetNS, Families: env.Families})
	if err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(func() { b.Close() })
	return b
}
