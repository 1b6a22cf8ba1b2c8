package iptables_test

import (
	"fmt"
	"net/netip"

	v1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/go-proxier/proxier/iptables"
	"github.com/go-proxier/proxier/iptables/fake"
	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/tracker"
)

// The rules of a node, without a kernel: the chains of a Service with one endpoint, and what happens to
// a packet in tables in memory.
func ExampleRenderer() {
	t, err := tracker.New(tracker.Config{Node: tracker.NodeInfo{Name: "node-1"}})
	if err != nil {
		panic(err)
	}
	t.SetService(&v1.Service{
		ObjectMeta: metav1.ObjectMeta{Namespace: "shop", Name: "cart"},
		Spec:       v1.ServiceSpec{ClusterIP: "10.96.0.7", Ports: []v1.ServicePort{{Port: 80, Protocol: v1.ProtocolTCP}}},
	})
	port, name, protocol := int32(8080), "", v1.ProtocolTCP
	t.SetSlice(&discovery.EndpointSlice{
		ObjectMeta:  metav1.ObjectMeta{Namespace: "shop", Name: "cart-1", Labels: map[string]string{discovery.LabelServiceName: "cart"}},
		AddressType: discovery.AddressTypeIPv4, Ports: []discovery.EndpointPort{{Name: &name, Port: &port, Protocol: &protocol}},
		Endpoints: []discovery.Endpoint{{Addresses: []string{"10.244.1.5"}}},
	})
	t.MarkSynced(tracker.KindServices, tracker.KindSlices, tracker.KindNodes)
	engine, err := ruleset.NewEngine(ruleset.Config{Source: t})
	if err != nil {
		panic(err)
	}

	r, err := iptables.NewRenderer(iptables.Config{}, tracker.IPv4)
	if err != nil {
		panic(err)
	}
	tx, err := r.Render(engine.Snapshot().Delta())
	if err != nil {
		panic(err)
	}
	for _, c := range tx.Chains() {
		if len(c.Name) > 8 && c.Name[:8] == "KUBE-SEP" {
			for _, rule := range c.Rules {
				fmt.Println(rule)
			}
		}
	}

	tables := fake.New()
	for _, in := range tx.Inputs(0) {
		if err := tables.Restore(in.Text); err != nil {
			panic(err)
		}
	}
	got := tables.Handle(ruleset.Packet{From: netip.MustParseAddr("10.244.1.9"), Protocol: v1.ProtocolTCP, To: netip.MustParseAddrPort("10.96.0.7:80")})
	fmt.Println(got.Action, got.Endpoints[0].Addr)
	// Output:
	// -s 10.244.1.5/32 -j KUBE-MARK-MASQ
	// -p tcp -j DNAT --to-destination 10.244.1.5:8080
	// forward 10.244.1.5:8080
}
