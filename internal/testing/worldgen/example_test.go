package worldgen_test

import (
	"fmt"
	"net/netip"

	v1 "k8s.io/api/core/v1"

	"github.com/go-proxier/proxier/internal/testing/worldgen"
	"github.com/go-proxier/proxier/tracker"
)

// Generate the first two states of a world and apply them to a tracker.
func Example() {
	addr := func(format string) func(tracker.Family, int) netip.Addr {
		return func(_ tracker.Family, n int) netip.Addr { return netip.MustParseAddr(fmt.Sprintf(format, n)) }
	}
	g := worldgen.New(1, worldgen.Params{
		Families:       []tracker.Family{tracker.IPv4},
		Node:           tracker.NodeInfo{Name: "node-a", Zone: "zone-a"},
		Backends:       []worldgen.Backend{{Node: "node-a", Addr: func(f tracker.Family) netip.Addr { return addr("10.1.0.%d")(f, 1) }, Ports: []uint16{8080}}},
		ClusterIP:      addr("172.30.0.%d"),
		ExternalIP:     addr("192.0.2.%d"),
		LoadBalancerIP: addr("198.51.100.%d"),
		Protocols:      []v1.Protocol{v1.ProtocolTCP},
	})
	t, err := tracker.New(tracker.Config{})
	if err != nil {
		fmt.Println(err)
		return
	}
	t.MarkSynced(tracker.KindServices, tracker.KindSlices, tracker.KindNodes)
	steps := worldgen.Steps{g.Start(), g.Step()}
	steps.Apply(t, len(steps)-1)
	fmt.Println(len(t.Take().Updates) > 0)
	// Output: true
}
