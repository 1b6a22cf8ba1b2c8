package conformance

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/go-proxier/proxier/internal/netlab"
)

// Run tests a backend in every world of the suite, each a parallel sub-test. A backend
// that forwards nothing at all fails in the first one, after a second, and the others
// are not run: most of them would wait for answers that do not come.
//
// TCP connections in which a packet was retransmitted fail, and so do UDP requests without
// an answer. [World.Churn] excuses requests, and every world connections, if the machine
// stalled. Each world logs how many it excused, and Run fails if it excused
// more than 1 % of all connections (and more than 16, which one stall can cost).
func Run(t *testing.T, o Options) {
	t.Helper()
	if err := o.validate(); err != nil {
		t.Fatal(err)
	}
	o.run = new(excuses)
	t.Cleanup(func() { o.run.report(t) })
	if !forwards(t, o) {
		return
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

// shortly is how long a backend has to forward one connection of two.
const shortly = 500 * time.Millisecond

// forwards is the first sub-test: it fails if the node refuses connections to a NodePort
// and a connection to the cluster IP gets no answer, shortly after the backend has
// reported success.
func forwards(t *testing.T, o Options) bool {
	return t.Run("something is forwarded", func(t *testing.T) {
		w := newWorld(t, o, config{})
		w.set(service{name: "web", number: 1, kind: "NodePort", ports: tcpAndUDP(30080), endpoints: on("pod1")})
		w.Sync()
		client, f := w.net.hosts["client1"], w.Env.Families[0]
		var said []string
		for _, to := range []target{atPrimary(30080), clusterIP(1, 80)} {
			o := client.probe(t.Context(), tcp, to.at(f), shortly)
			if o.kind == reached || to.at(f).Addr() == primary(f) && o.kind != refused {
				return
			}
			said = append(said, fmt.Sprintf("TCP from %s to %s (%s): %s, must be forwarded", client.name, to.name, to.at(f), o))
		}
		t.Errorf("the backend forwards nothing; no other world is run:\n%s", strings.Join(said, "\n"))
	})
}
