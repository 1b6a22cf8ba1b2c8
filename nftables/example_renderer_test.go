package nftables_test

import (
	"context"
	"fmt"
	"net/netip"
	"strings"

	v1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/go-proxier/proxier/nftables"
	"github.com/go-proxier/proxier/nftables/fake"
	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/tracker"
)

// The rules of a node, without a kernel: those that send a connection to one of two endpoints, what "nft -f"
// must read when a Service gets its second endpoint, and what happens to a packet in tables in memory.
func ExampleRenderer() {
	t, err := tracker.New(tracker.Config{Node: tracker.NodeInfo{Name: "node-1"}})
	if err != nil {
		panic(err)
	}
	t.SetService(&v1.Service{
		ObjectMeta: metav1.ObjectMeta{Namespace: "shop", Name: "cart"},
		Spec:       v1.ServiceSpec{ClusterIP: "10.96.0.7", Ports: []v1.ServicePort{{Port: 80, Protocol: v1.ProtocolTCP}}},
	})
	setEndpoints := func(addresses ...string) {
		port, name, protocol := int32(8080), "", v1.ProtocolTCP
		slice := &discovery.EndpointSlice{
			ObjectMeta:  metav1.ObjectMeta{Namespace: "shop", Name: "cart-1", Labels: map[string]string{discovery.LabelServiceName: "cart"}},
			AddressType: discovery.AddressTypeIPv4, Ports: []discovery.EndpointPort{{Name: &name, Port: &port, Protocol: &protocol}},
		}
		for _, a := range addresses {
			slice.Endpoints = append(slice.Endpoints, discovery.Endpoint{Addresses: []string{a}})
		}
		t.SetSlice(slice)
	}
	setEndpoints("10.244.1.5")
	t.MarkSynced(tracker.KindServices, tracker.KindSlices, tracker.KindNodes)
	engine, err := ruleset.NewEngine(ruleset.Config{Source: t})
	if err != nil {
		panic(err)
	}

	r, err := nftables.NewRenderer(nftables.Config{}, tracker.IPv4)
	if err != nil {
		panic(err)
	}
	tables := fake.New()
	var last *nftables.Transaction
	cursor := engine.Attach("renderer", ruleset.BackendFunc(func(_ context.Context, d *ruleset.Delta) error {
		if last, err = r.Render(d); err != nil {
			return err
		}
		return tables.Load(last.String())
	}))
	if err := cursor.Sync(context.Background()); err != nil {
		panic(err)
	}
	for _, c := range last.Chains() {
		if c.Name == "pool-2" {
			fmt.Println(strings.Join(c.Rules, "\n"))
		}
	}
	setEndpoints("10.244.1.5", "10.244.2.9")
	if err := cursor.Sync(context.Background()); err != nil {
		panic(err)
	}
	fmt.Print(last)
	got := tables.Handle(ruleset.Packet{From: netip.MustParseAddr("10.244.1.9"), Protocol: v1.ProtocolTCP, To: netip.MustParseAddrPort("10.96.0.7:80")})
	fmt.Println(got.Action, got.Endpoints[0].Addr, got.Endpoints[1].Addr)
	// Output:
	// update @connections { ip daddr . meta l4proto . th dport counter }
	// meta l4proto tcp dnat ip to meta priority & f:ffff . numgen random mod 2 map @tcp-endpoints
	// meta l4proto udp dnat ip to meta priority & f:ffff . numgen random mod 2 map @udp-endpoints
	// meta l4proto sctp dnat ip to meta priority & f:ffff . numgen random mod 2 map @sctp-endpoints
	// delete element ip proxier service-ips {
	// 	10.96.0.7 . tcp . 80
	// }
	// create element ip proxier handlers {
	// 	8020:0 : goto pool-2
	// }
	// create element ip proxier tcp-endpoints {
	// 	0:1 . 1 : 10.244.2.9 . 8080
	// }
	// create element ip proxier hairpin-connections {
	// 	10.244.2.9 . 10.244.2.9
	// }
	// create element ip proxier service-ips {
	// 	10.96.0.7 . tcp . 80 comment "shop/cart" : 8020:1
	// }
	// forward 10.244.1.5:8080 10.244.2.9:8080
}
