//go:build linux

package nftables

import (
	"flag"
	"testing"

	"github.com/go-proxier/proxier/internal/testing/testtime"
	"github.com/go-proxier/proxier/internal/testing/vm"
	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/ruleset/conformance"
	"github.com/go-proxier/proxier/tracker"
)

var offloadAll = flag.Bool("offload.all", false, "run all worlds with offload, in both families")

// notOffload are the features whose worlds are about a connection's first packet.
var notOffload = []conformance.Feature{
	conformance.SCTP, conformance.Affinity, conformance.AffinityInternal, conformance.AffinityTimeout, conformance.SourceRanges,
	conformance.NodePortAddresses, conformance.LoopbackNodePorts, conformance.ClosedPorts, conformance.ServiceCIDRs, conformance.Distribution, conformance.WeightedEndpoints,
	conformance.ConsistentHash, conformance.HashOfEndpoints, conformance.OtherPorts, conformance.RefuseBySource,
}

// TestOffloadConformance puts connections on the fast path as soon as they are established.
func TestOffloadConformance(t *testing.T) {
	testtime.NeedComplete(t)
	t.Parallel()
	if !vm.Inside(t, vm.Debian, "") {
		return
	}
	skip := skips()
	for _, f := range notOffload {
		if !*offloadAll {
			skip[f] = "not concerned by offload (-offload.all runs it)"
		}
	}
	families := []tracker.Family{tracker.IPv4} // TestOffloadByFlowtables tests both
	if *offloadAll {
		families = nil
	}
	conformance.Run(t, conformance.Options{Skip: skip, Families: families, New: func(tb testing.TB, env conformance.Env) ruleset.Backend {
		b, err := New(tb.Context(), Config{NetNS: env.NetNS, Families: env.Families, Offload: &Offload{
			Interfaces: everyInterface, AfterPackets: 1, UDP: true,
		}})
		if err != nil {
			tb.Fatal(err)
		}
		tb.Cleanup(func() { b.Close() })
		return b
	}})
}
