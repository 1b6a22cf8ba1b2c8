package conformance_test

import (
	"flag"
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

var offloadAll = flag.Bool("offload.all", false, "run all worlds with offload")

// notOffload are the features whose worlds are about a connection's first packet.
var notOffload = []conformance.Feature{
	conformance.SCTP, conformance.Affinity, conformance.AffinityNear, conformance.AffinityTimeout, conformance.SourceRanges,
	conformance.NodePortAddresses, conformance.ClosedPorts, conformance.ServiceCIDRs, conformance.Distribution, conformance.WeightedEndpoints,
	conformance.ConsistentHash, conformance.HashOfEndpoints, conformance.OtherPorts, conformance.RefuseBySource,
}

// TestNFTablesOffload has connections take the fast path as soon as they are established.
func TestNFTablesOffload(t *testing.T) {
	if testing.Short() {
		t.Skip("takes a minute")
	}
	if !vm.Inside(t, vm.Debian) {
		return
	}
	skip := map[conformance.Feature]string{}
	for _, f := range notOffload {
		if !*offloadAll {
			skip[f] = "not concerned by offload (-offload.all runs it)"
		}
	}
	conformance.Run(t, conformance.Options{Skip: skip, New: func(tb testing.TB, env conformance.Env) ruleset.Backend {
		b, err := nftables.New(tb.Context(), nftables.Config{NetNS: env.NetNS, Families: env.Families, Offload: &nftables.Offload{
			Interfaces: func(string) bool { return true }, AfterPackets: 1, UDP: true,
		}})
		if err != nil {
			tb.Fatal(err)
		}
		tb.Cleanup(func() { b.Close() })
		return b
	}})
}
