package conformance_test

import (
	"testing"

	"github.com/go-proxier/proxier/internal/vm"
	"github.com/go-proxier/proxier/nftables"
	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/ruleset/conformance"
)

func TestNFTables(t *testing.T) {
	if testing.Short() {
		t.Skip("takes a minute")
	}
	if !vm.Inside(t, vm.Debian) {
		return
	}
	conformance.Run(t, conformance.Options{New: func(tb testing.TB, env conformance.Env) ruleset.Backend {
		b, err := nftables.New(tb.Context(), nftables.Config{NetNS: env.NetNS, Families: env.Families})
		if err != nil {
			tb.Fatal(err)
		}
		tb.Cleanup(func() { b.Close() })
		return b
	}})
}
