package ruleset_test

import (
	"fmt"
	"net/netip"

	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/tracker"
)

// webKey is the key of the port of Service web.
var webKey = tracker.Key{
	ServicePortName: tracker.ServicePortName{
		NamespacedName: types.NamespacedName{Namespace: "shop", Name: "web"},
		Protocol:       v1.ProtocolTCP,
	},
	Family: tracker.IPv4,
}

// Compile a Service port under internalTrafficPolicy Local for two nodes. Only node-a has
// an endpoint.
func ExampleCompile() {
	state := tracker.PortState{
		Port: &tracker.ServicePort{
			Key: webKey, ClusterIP: netip.MustParseAddr("172.30.0.1"), Port: 80, InternalLocal: true,
		},
		Endpoints: []*tracker.Endpoint{
			{Addr: netip.MustParseAddrPort("10.1.0.1:8080"), Node: "node-a", Ready: true, Weight: 1},
		},
	}
	for _, name := range []string{"node-a", "node-b"} {
		node := &ruleset.Node{Info: tracker.NodeInfo{Name: name}}
		s := ruleset.Compile(state, node, tracker.TopologyOptions{})
		for _, f := range s.Frontends {
			fmt.Println(name, f.Kind, f.Addr, f.Target, s.Pool(f.Target))
		}
	}
	// Output:
	// node-a cluster IP 172.30.0.1 local endpoints [10.1.0.1:8080]
	// node-b cluster IP 172.30.0.1 drop []
}

// Convert weights to numbers of buckets.
func ExampleShares() {
	eps := []*tracker.Endpoint{
		{Addr: netip.MustParseAddrPort("10.1.0.1:8080"), Weight: 100},
		{Addr: netip.MustParseAddrPort("10.2.0.1:8080"), Weight: 300},
	}
	fmt.Println(ruleset.Shares(eps))
	// Output: [1 3]
}
