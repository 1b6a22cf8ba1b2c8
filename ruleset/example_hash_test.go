package ruleset_test

import (
	"fmt"
	"net/netip"

	v1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"

	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/tracker"
)

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
