package conformance

import (
	"slices"
	"testing"

	"github.com/go-proxier/proxier/internal/netlab"
)

// Run tests a backend in every world of the suite, each a parallel sub-test.
func Run(t *testing.T, o Options) {
	t.Helper()
	if err := o.validate(); err != nil {
		t.Fatal(err)
	}
	worlds := slices.Concat(
		// Those that wait come first.
		affinityPacketWorlds(),
		changePacketWorlds(),
		bridgeWorlds(),
		weightPacketWorlds(),
		hashPacketWorlds(),
		distributionWorlds(),
		scriptedWorlds(),
	)
	for _, world := range worlds {
		t.Run(world.name, func(t *testing.T) {
			for _, f := range world.needs {
				if why, ok := o.Skip[f]; ok {
					t.Skipf("the backend does not do %s: %s", f, why)
				}
			}
			if world.config.sctp {
				netlab.Need(t, sctpTracked(), "a kernel that tracks SCTP connections (CONFIG_NF_CT_PROTO_SCTP)")
			}
			t.Parallel()
			world.run(newWorld(t, o, world.config))
		})
	}
}

// packets is the script of a world that needs real packets.
func packets(run func(*World)) func(cluster) { return func(w cluster) { run(w.(*World)) } }
