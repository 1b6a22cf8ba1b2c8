package ovs_test

import (
	"context"
	"fmt"
	"net/netip"

	v1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/go-proxier/proxier/examples/ovs"
	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/tracker"
)

// A Plane programs a Switch with one Service, and the Switch processes a packet.
func Example() {
	t, err := tracker.New(tracker.Config{Node: tracker.NodeInfo{Name: "n1"}})
	if err != nil {
		fmt.Println(err)
		return
	}
	engine, err := ruleset.NewEngine(ruleset.Config{Source: t})
	if err != nil {
		fmt.Println(err)
		return
	}
	sw := ovs.NewSwitch(func() error { return nil }, func() {})
	plane, err := ovs.New(sw)
	if err != nil {
		fmt.Println(err)
		return
	}
	cursor := engine.Attach("switch", plane)

	t.SetService(&v1.Service{
		ObjectMeta: metav1.ObjectMeta{Namespace: "shop", Name: "web"},
		Spec:       v1.ServiceSpec{ClusterIP: "10.96.0.1", Ports: []v1.ServicePort{{Port: 80}}},
	})
	t.SetSlice(&discovery.EndpointSlice{
		ObjectMeta:  metav1.ObjectMeta{Namespace: "shop", Name: "web-1", Labels: map[string]string{discovery.LabelServiceName: "web"}},
		AddressType: discovery.AddressTypeIPv4,
		Ports:       []discovery.EndpointPort{{Name: new(""), Port: new(int32(8080))}},
		Endpoints:   []discovery.Endpoint{{Addresses: []string{"10.0.0.1"}}},
	})
	t.MarkSynced(tracker.KindServices, tracker.KindSlices, tracker.KindNodes)
	if err := cursor.Sync(context.Background()); err != nil {
		fmt.Println(err)
		return
	}

	r := sw.Process(ruleset.Packet{
		From: netip.MustParseAddr("10.0.0.9"), InInterface: "eth0", Protocol: v1.ProtocolTCP, To: netip.MustParseAddrPort("10.96.0.1:80"),
	})
	fmt.Println(r.Action, r.Buckets[0].Endpoint.Addr)
	// Output:
	// forward 10.0.0.1:8080
}
