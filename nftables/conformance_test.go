//go:build linux

package nftables

import (
	"os"
	"testing"

	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/ruleset/conformance"
)

// TestConformance sends packets through every world of the conformance suite, and gives each world's last
// listing to the nft tool, if there is one.
func TestConformance(t *testing.T) {
	t.Parallel()
	_, err := tool("", "--version")
	if err != nil {
		t.Log("the nft tool is missing: no listing is loaded again")
	}
	conformance.Run(t, conformance.Options{Skip: skips(), New: func(tb testing.TB, env conformance.Env) ruleset.Backend {
		b := newForWorld(tb, env)
		if err == nil {
			tb.Cleanup(func() {
				if err := env.Do(func() error { return loads(false) }); err != nil {
					tb.Error(err)
				}
			})
		}
		return b
	}})
}

// skips lists the features of the suite that a kernel lacks. In a virtual machine, a counter
// sometimes lacks one packet, for an unknown reason.
func skips() map[conformance.Feature]string {
	out := map[conformance.Feature]string{conformance.LoopbackNodePorts: "a packet from a loopback address cannot leave the node"}
	if os.Getenv("PROXIER_VM_INSIDE") != "" {
		out[conformance.TrafficAtOnce] = "an emulated kernel counts one packet too few now and then"
	}
	return out
}

func newForWorld(tb testing.TB, env conformance.Env) ruleset.Backend {
	b, err := New(tb.Context(), Config{NetNS: env.NetNS, Families: env.Families})
	if err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(func() { b.Close() })
	return b
}
