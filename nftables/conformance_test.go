//go:build linux

package nftables

import (
	"os"
	"testing"

	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/ruleset/conformance"
)

// TestConformance sends packets through every world of the conformance suite.
func TestConformance(t *testing.T) {
	conformance.Run(t, conformance.Options{New: newForWorld, Skip: skips()})
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
