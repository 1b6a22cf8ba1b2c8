package fake_test

import (
	"fmt"
	"net/netip"

	v1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/go-proxier/proxier/nftables"
	"github.com/go-proxier/proxier/nftables/fake"
	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/tracker"
)

// A test of rules on any system: where does the node send a packet?
func Example() {
	snapshot, err := oneService()
	if err != nil {
		panic(err)
	}
	r, err := nftables.NewRenderer(nftables.Config{}, tracker.IPv4)
	if err != nil {
		panic(err)
	}
	tx, err := r.Render(snapshot.Delta())
	if err != nil {
		panic(err)
	}
	tables := fake.New()
	if err := tables.Load(tx.String()); err != nil { // as the kernel: all of it or nothing
		panic(err)
	}
	for _, to := range []string{"10.96.0.7:80", "10.96.0.7:81"} {
		out := tables.Handle(ruleset.Packet{
			From: netip.MustParseAddr("10.244.9.9"), InInterface: "eth0", To: netip.MustParseAddrPort(to), Protocol: v1.ProtocolTCP,
		})
		fmt.Println(to, out.Action)
		for _, c := range out.Endpoints {
			fmt.Println("  to", c.Addr, "masqueraded:", c.Masquerade)
		}
	}
	// Output:
	// 10.96.0.7:80 forward
	//   to 10.244.1.5:8080 masqueraded: false
	//   to 10.244.2.9:8080 masqueraded: false
	// 10.96.0.7:81 reject
}

// oneService returns the ruleset of one Service with two endpoints.
func oneService() (*ruleset.Snapshot, error) {
	t, err := tracker.New(tracker.Config{Node: tracker.NodeInfo{Name: "node-1"}})
	if err != nil {
		return nil, err
	}
	t.SetService(&v1.Service{
		ObjectMeta: metav1.ObjectMeta{Namespace: "shop", Name: "cart"},
		Spec:       v1.ServiceSpec{ClusterIP: "10.96.0.7", Ports: []v1.ServicePort{{Port: 80, Protocol: v1.ProtocolTCP}}},
	})
	port, name, protocol := int32(8080), "", v1.ProtocolTCP
	t.SetSlice(&discovery.EndpointSlice{
		ObjectMeta:  metav1.ObjectMeta{Namespace: "shop", Name: "cart-1", Labels: map[string]string{discovery.LabelServiceName: "cart"}},
		AddressType: discovery.AddressTypeIPv4, Ports: []discovery.EndpointPort{{Name: &name, Port: &port, Protocol: &protocol}},
		Endpoints: []discovery.Endpoint{{Addresses: []string{"10.244.1.5"}}, {Addresses: []string{"10.244.2.9"}}},
	})
	t.MarkSynced(tracker.KindServices, tracker.KindSlices, tracker.KindNodes)
	engine, err := ruleset.NewEngine(ruleset.Config{Source: t})
	if err != nil {
		return nil, err
	}
	return engine.Snapshot(), nil
}
