package conformance

import (
	"slices"
	"testing"

	"github.com/go-proxier/proxier/internal/netlab"
)

// world is one of the suite's.
type world struct {
	name string
	// needs is what the backend must do for it.
	needs  []Feature
	config config
	run    func(*World)
}

// Run tests a backend in every world of the suite, each a parallel sub-test. TCP
// connections in which a packet was retransmitted fail. They are excused if the
// machine stalled; each world logs how many it excused, and Run fails if it excused
// more than 1 % of all connections (and more than 16, which one stall can cost).
func Run(t *testing.T, o Options) {
	t.Helper()
	if err := o.validate(); err != nil {
		t.Fatal(err)
	}
	o.run = new(excuses)
	t.Cleanup(func() { o.run.report(t) })
	worlds := slices.Concat(
		// Those that wait come first.
		affinityWorlds(),
		changeWorlds(),
		togetherWorlds(),
		weightWorlds(),
		hashWorlds(),
		clusterIPWorlds(),
		nodePortWorlds(),
		externalWorlds(),
		policyWorlds(),
		masqueradeWorlds(),
		topologyWorlds(),
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

// overUDP returns the rows over TCP and over UDP.
func overUDP(rows ...row) []row {
	out := make([]row, 0, 2*len(rows))
	for _, r := range rows {
		r.proto = tcp
		out = append(out, r)
		r.proto = udp
		out = append(out, r)
	}
	return out
}

// everyone is one host of every sort; of its pods, only pod1 is an endpoint in
// most worlds.
const everyone = "client1 remote3 pod1 pod3 node"

// tcpAndUDP returns a Service's ports: port 80 over both protocols, with node
// ports unless 0.
func tcpAndUDP(nodePort int32) []port {
	return []port{
		{name: "tcp", protocol: tcp, nodePort: nodePort},
		{name: "udp", protocol: udp, nodePort: nodePort},
	}
}
