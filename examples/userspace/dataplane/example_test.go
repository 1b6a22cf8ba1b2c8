package dataplane_test

import (
	"context"
	"fmt"
	"io"
	"net"

	v1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/go-proxier/proxier/examples/userspace/dataplane"
	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/tracker"
)

// The Service's address is one that the node already has, so this needs no privileges.
func Example() {
	// The endpoint.
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		fmt.Println(err)
		return
	}
	defer l.Close()
	go func() {
		for c, err := l.Accept(); err == nil; c, err = l.Accept() {
			fmt.Fprint(c, "hello from the endpoint")
			c.Close()
		}
	}()
	name, port := "", int32(l.Addr().(*net.TCPAddr).Port)

	t, err := tracker.New(tracker.Config{})
	if err != nil {
		fmt.Println(err)
		return
	}
	engine, err := ruleset.NewEngine(ruleset.Config{Source: t})
	if err != nil {
		fmt.Println(err)
		return
	}
	backend := dataplane.New(dataplane.Config{})
	cursor := engine.Attach("userspace", backend)
	t.SetService(&v1.Service{
		ObjectMeta: metav1.ObjectMeta{Namespace: "shop", Name: "web"},
		Spec:       v1.ServiceSpec{ClusterIP: "127.0.0.1", Ports: []v1.ServicePort{{Port: 18080}}},
	})
	t.SetSlice(&discovery.EndpointSlice{
		ObjectMeta:  metav1.ObjectMeta{Namespace: "shop", Name: "web-1", Labels: map[string]string{discovery.LabelServiceName: "web"}},
		AddressType: discovery.AddressTypeIPv4,
		Ports:       []discovery.EndpointPort{{Name: &name, Port: &port}},
		Endpoints:   []discovery.Endpoint{{Addresses: []string{"127.0.0.1"}}},
	})
	t.MarkSynced(tracker.KindServices, tracker.KindSlices, tracker.KindNodes)
	ctx := context.Background()
	if err := cursor.Sync(ctx); err != nil {
		fmt.Println(err)
	}

	c, err := net.Dial("tcp", "127.0.0.1:18080")
	if err != nil {
		fmt.Println(err)
		return
	}
	text, err := io.ReadAll(c)
	c.Close()
	fmt.Println(string(text), err)
	fmt.Println(backend.Shutdown(ctx))
	// Output:
	// hello from the endpoint <nil>
	// <nil>
}
