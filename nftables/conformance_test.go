//go:build linux

package nftables

import (
	"flag"
	"fmt"
	"maps"
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/go-proxier/proxier/internal/testing/backendtest"
	"github.com/go-proxier/proxier/internal/testing/must"
	"github.com/go-proxier/proxier/internal/testing/testtime"
	"github.com/go-proxier/proxier/internal/testing/vm"
	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/ruleset/conformance"
	"github.com/go-proxier/proxier/tracker"
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
				if err := env.Do(func() error { return loads(tb, false) }); err != nil {
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
	b := must.Get(New(tb.Context(), Config{NetNS: env.NetNS, Families: env.Families}))(tb)
	tb.Cleanup(func() { b.Close() })
	return b
}

// TestRandomWorlds sends packets through random worlds, and compares the tables after each change
// with those of a cold start.
func TestRandomWorlds(t *testing.T) {
	t.Parallel()
	worlds := 50
	if !testtime.Thorough() {
		worlds = 5
	}
	conformance.RunRandom(t, conformance.Options{New: newForWorld}, conformance.Random{
		First: *backendtest.Seed, Worlds: worlds, For: *backendtest.Soak,
		Dump: func(tb testing.TB, env conformance.Env, b ruleset.Backend) string {
			var out strings.Builder
			for _, f := range env.Families {
				v := kernelView(tb, b.(*Backend), f)
				for _, k := range slices.Sorted(maps.Keys(v)) {
					fmt.Fprintf(&out, "%v %s: %s\n", f, k, v[k])
				}
			}
			return out.String()
		},
	})
}

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
	if !vm.Inside(t, vm.Debian) {
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
			Interfaces: everyInterface, afterPackets: 1, udp: true,
		}})
		if err != nil {
			tb.Fatal(err)
		}
		tb.Cleanup(func() { b.Close() })
		return b
	}})
}
