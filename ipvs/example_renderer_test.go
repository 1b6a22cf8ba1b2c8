package ipvs_test

import (
	"fmt"

	v1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/go-proxier/proxier/ipvs"
	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/tracker"
)

// The virtual servers of a Service. No kernel is needed.
func ExampleRenderer() {
	t, err := tracker.New(tracker.Config{Node: tracker.NodeInfo{Name: "node-1"}})
	if err != nil {
		panic(err)
	}
	t.SetService(&v1.Service{
		ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "web"},
		Spec: v1.ServiceSpec{
			ClusterIP: "10.96.0.7", ClusterIPs: []string{"10.96.0.7"}, IPFamilies: []v1.IPFamily{v1.IPv4Protocol},
			Ports: []v1.ServicePort{{Name: "http", Protocol: v1.ProtocolTCP, Port: 80}},
		},
	})
	name, port, protocol := "http", int32(8080), v1.ProtocolTCP
	t.SetSlice(&discovery.EndpointSlice{
		ObjectMeta:  metav1.ObjectMeta{Namespace: "default", Name: "web-1", Labels: map[string]string{discovery.LabelServiceName: "web"}},
		AddressType: discovery.AddressTypeIPv4, Ports: []discovery.EndpointPort{{Name: &name, Port: &port, Protocol: &protocol}},
		Endpoints: []discovery.Endpoint{{Addresses: []string{"10.244.1.5"}}},
	})
	t.MarkSynced(tracker.KindServices, tracker.KindSlices, tracker.KindNodes)
	engine, err := ruleset.NewEngine(ruleset.Config{Source: t})
	if err != nil {
		panic(err)
	}

	r, err := ipvs.NewRenderer(ipvs.Config{})
	if err != nil {
		panic(err)
	}
	tx, err := r.Render(engine.Snapshot().Delta())
	if err != nil {
		panic(err)
	}
	for _, in := range tx.Inputs() {
		if in.Program == "ipvsadm -R" {
			fmt.Print(in.Text)
		}
	}
	// Output:
	// -A -t 10.96.0.7:80 -s rr
	// -a -t 10.96.0.7:80 -r 10.244.1.5:8080 -m -w 1
}
