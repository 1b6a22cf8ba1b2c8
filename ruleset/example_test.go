package ruleset_test

import (
	"context"
	"fmt"
	"net/netip"

	v1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/tracker"
)

// web is a Service at 172.30.0.1:80 and at node port 30080.
var web = &v1.Service{
	ObjectMeta: metav1.ObjectMeta{Namespace: "shop", Name: "web"},
	Spec: v1.ServiceSpec{
		Type:                  v1.ServiceTypeNodePort,
		ClusterIP:             "172.30.0.1",
		ClusterIPs:            []string{"172.30.0.1"},
		IPFamilies:            []v1.IPFamily{v1.IPv4Protocol},
		Ports:                 []v1.ServicePort{{Port: 80, NodePort: 30080, Protocol: v1.ProtocolTCP}},
		ExternalTrafficPolicy: v1.ServiceExternalTrafficPolicyLocal,
	},
}

// ptr returns a pointer to a copy of v.
func ptr[T any](v T) *T { return &v }

// webSlice returns a slice with one endpoint on each of two nodes and one for each
// address in more.
func webSlice(more ...string) *discovery.EndpointSlice {
	s := &discovery.EndpointSlice{
		ObjectMeta: metav1.ObjectMeta{
			Namespace: "shop", Name: "web-1",
			Labels: map[string]string{discovery.LabelServiceName: "web"},
		},
		AddressType: discovery.AddressTypeIPv4,
		Ports:       []discovery.EndpointPort{{Name: ptr(""), Port: ptr(int32(8080)), Protocol: ptr(v1.ProtocolTCP)}},
		Endpoints: []discovery.Endpoint{
			{Addresses: []string{"10.1.0.1"}, NodeName: ptr("node-a")},
			{Addresses: []string{"10.2.0.1"}, NodeName: ptr("node-b")},
		},
	}
	for _, a := range more {
		s.Endpoints = append(s.Endpoints, discovery.Endpoint{Addresses: []string{a}})
	}
	return s
}

// Attach a backend that prints the changes of each delta.
func Example() {
	t, err := tracker.New(tracker.Config{Node: tracker.NodeInfo{Name: "node-a"}})
	if err != nil {
		fmt.Println(err)
		return
	}
	engine, err := ruleset.NewEngine(ruleset.Config{Source: t})
	if err != nil {
		fmt.Println(err)
		return
	}
	cursor := engine.Attach("print", ruleset.BackendFunc(func(_ context.Context, d *ruleset.Delta) error {
		for _, c := range d.Changes {
			fmt.Println(c.Key)
			if c.New != nil && c.Fields&ruleset.FieldFrontends != 0 {
				for _, f := range c.New.Frontends {
					fmt.Printf("  %s %d: %s\n", f.Kind, f.Port, f.Target)
				}
			}
			for ep := range c.Upserted() {
				fmt.Println("  +", ep)
			}
			for ep := range c.Removed() {
				fmt.Println("  -", ep)
			}
		}
		return nil
	}))

	// In an agent, informers set the objects and a runner calls Sync.
	ctx := context.Background()
	t.SetService(web)
	t.SetSlice(webSlice())
	t.MarkSynced(tracker.KindServices, tracker.KindSlices, tracker.KindNodes)
	for _, change := range []func(){
		func() {},
		func() { t.SetSlice(webSlice("10.3.0.1")) },
		func() { t.SetSlice(webSlice()) },
	} {
		change()
		if err := cursor.Sync(ctx); err != nil {
			fmt.Println(err)
		}
	}
	// Output:
	// shop/web/TCP/IPv4
	//   cluster IP 80: cluster endpoints
	//   node port 30080: local endpoints
	//   + 10.1.0.1:8080
	//   + 10.2.0.1:8080
	// shop/web/TCP/IPv4
	//   + 10.3.0.1:8080
	// shop/web/TCP/IPv4
	//   - 10.3.0.1:8080
}

// Find out what happens to a packet, and why.
func ExampleSnapshot_Trace() {
	t, err := tracker.New(tracker.Config{Node: tracker.NodeInfo{Name: "node-a"}})
	if err != nil {
		fmt.Println(err)
		return
	}
	engine, err := ruleset.NewEngine(ruleset.Config{Source: t})
	if err != nil {
		fmt.Println(err)
		return
	}
	t.SetService(web)
	t.SetSlice(webSlice())
	t.MarkSynced(tracker.KindServices, tracker.KindSlices, tracker.KindNodes)

	snapshot := engine.Snapshot()
	for _, to := range []string{"192.0.2.1:30080", "172.30.0.1:80", "172.30.0.1:81"} {
		v := snapshot.Trace(ruleset.Packet{
			From:          netip.MustParseAddr("198.51.100.7"),
			InInterface:   "eth0",
			Protocol:      v1.ProtocolTCP,
			To:            netip.MustParseAddrPort(to),
			NodeAddresses: []netip.Addr{netip.MustParseAddr("192.0.2.1")},
		})
		fmt.Printf("%s: %s %v\n  %s\n", to, v.Action, v.Endpoints, v.Rule)
	}
	// Output:
	// 192.0.2.1:30080: forward [10.1.0.1:8080]
	//   node port of shop/web/TCP/IPv4 goes to its local endpoints
	// 172.30.0.1:80: forward [10.1.0.1:8080 10.2.0.1:8080]
	//   cluster IP of shop/web/TCP/IPv4 goes to its cluster endpoints
	// 172.30.0.1:81: reject []
	//   TCP 81 is a closed port of a cluster IP (of shop/web)
}

// Restrict NodePorts to one IPv4 range. IPv6 stays unrestricted.
func ExampleParseNodePortAddresses() {
	n, err := ruleset.ParseNodePortAddresses([]string{"192.0.2.0/24"})
	if err != nil {
		fmt.Println(err)
		return
	}
	four := n.Resolve(tracker.NodeInfo{}, tracker.IPv4)
	six := n.Resolve(tracker.NodeInfo{}, tracker.IPv6)
	fmt.Println(four.Prefixes, six.All)
	// Output: [192.0.2.0/24] true
}

// Parts of a Service that differ, as a log line shows them.
func ExampleField_String() {
	fmt.Println(ruleset.FieldFrontends|ruleset.FieldLocal, ruleset.Field(0), ruleset.FieldAll)
	// Output: frontends|local none all
}
