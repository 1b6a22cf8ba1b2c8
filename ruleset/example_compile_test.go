package ruleset_test

import (
	"fmt"
	"net/netip"

	v1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"
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
		s := ruleset.Compile(state, node)
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

// Choose endpoints by a hash of the client's address and port, with a higher weight
// for one of them. The endpoint of a connection can then be computed, as a data plane
// in software does and as package nftables makes the kernel do.
func ExamplePort_HashOf() {
	t, err := tracker.New(tracker.Config{
		OnService: func(_ *v1.Service, _ *v1.ServicePort, p *tracker.ServicePort) error {
			p.Hash = tracker.HashSourcePort
			p.HashBuckets = 1000 // fixed, whatever the number of endpoints
			return nil
		},
		OnEndpoint: func(_ *discovery.EndpointSlice, _ *discovery.Endpoint, ep *tracker.Endpoint) error {
			if ep.Node == "node-b" {
				ep.Weight = 3
			}
			return nil
		},
	})
	if err != nil {
		fmt.Println(err)
		return
	}
	const seed = 42 // the same on all nodes
	engine, err := ruleset.NewEngine(ruleset.Config{Source: t, HashSeed: seed})
	if err != nil {
		fmt.Println(err)
		return
	}
	t.SetService(web)
	t.SetSlice(webSlice())

	t.MarkSynced(tracker.KindServices, tracker.KindSlices, tracker.KindNodes)
	svc := engine.Snapshot().Ports[0]
	pool, table := svc.Pool(ruleset.TargetCluster), svc.Maglev(ruleset.TargetCluster, seed)
	count := map[string]int{}
	for port := range uint16(4000) {
		client := netip.AddrPortFrom(netip.MustParseAddr("192.0.2.17"), 40000+port)
		ep := pool[table.Find(svc.HashOf(client, seed))]
		count[ep.Node] += 100
	}
	fmt.Println(table.Len(), "buckets")
	for _, node := range []string{"node-a", "node-b"} {
		fmt.Println(node, (count[node]/4000+2)/5*5, "%") // in steps of five
	}
	// Output:
	// 1021 buckets
	// node-a 25 %
	// node-b 75 %
}
