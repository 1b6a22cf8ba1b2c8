package agent_test

import (
	"context"
	"fmt"
	"log"

	v1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"

	"github.com/go-proxier/proxier/examples/agent"
	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/tracker"
)

// This agent gets kube-proxy's arguments, objects of the program's own, and a data plane that prints.
// One with a Client instead of a Source follows an API server, and one without a Backend programs the
// kernel.
func Example() {
	config, err := agent.ParseArgs([]string{"--proxy-mode=nftables", "--cluster-cidr=10.42.0.0/16"}, nil)
	if err != nil {
		log.Fatal(err)
	}
	ctx, stop := context.WithCancel(context.Background())
	a, err := agent.New(ctx, agent.Options{
		Config: config, NodeName: "node-a",
		Source: func(ctx context.Context, to *agent.Objects) error {
			to.SetService(&v1.Service{
				ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "web"},
				Spec:       v1.ServiceSpec{ClusterIP: "10.96.0.10", ClusterIPs: []string{"10.96.0.10"}, Ports: []v1.ServicePort{{Port: 80, Protocol: v1.ProtocolTCP}}},
			})
			to.SetSlice(&discovery.EndpointSlice{
				ObjectMeta:  metav1.ObjectMeta{Namespace: "default", Name: "web-1", Labels: map[string]string{discovery.LabelServiceName: "web"}},
				AddressType: discovery.AddressTypeIPv4, Ports: []discovery.EndpointPort{{Name: ptr.To(""), Port: ptr.To[int32](8080)}},
				Endpoints: []discovery.Endpoint{{Addresses: []string{"10.42.0.2"}}},
			})
			to.Synced()
			<-ctx.Done()
			return nil
		},
		Backend: func(context.Context, []tracker.Family) (ruleset.Backend, error) {
			return ruleset.BackendFunc(func(_ context.Context, d *ruleset.Delta) error {
				for _, c := range d.Changes {
					for _, e := range c.New.Selection.Reachable {
						fmt.Println(c.New.Key, "->", e.Addr)
					}
				}
				return nil
			}), nil
		},
	})
	if err != nil {
		log.Fatal(err)
	}
	ended := make(chan error)
	go func() { ended <- a.Run(ctx) }()
	<-a.Synced()
	stop()
	fmt.Println("Run:", <-ended)
	// Output:
	// default/web/TCP/IPv4 -> 10.42.0.2:8080
	// Run: <nil>
}
