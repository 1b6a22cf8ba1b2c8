package patterns_test

import (
	"fmt"

	v1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/tracker"
)

// service returns a Service with one TCP port, 80.
func service(name, clusterIP string) *v1.Service {
	return &v1.Service{
		ObjectMeta: metav1.ObjectMeta{Namespace: "shop", Name: name},
		Spec:       v1.ServiceSpec{ClusterIP: clusterIP, Ports: []v1.ServicePort{{Port: 80}}},
	}
}

// slice returns an EndpointSlice with an endpoint on each of the nodes: 10.0.0.1 on the
// first node, 10.0.0.2 on the second and so on.
func slice(service string, nodes ...string) *discovery.EndpointSlice {
	s := &discovery.EndpointSlice{
		ObjectMeta: metav1.ObjectMeta{
			Namespace: "shop", Name: service + "-1", Labels: map[string]string{discovery.LabelServiceName: service},
		},
		AddressType: discovery.AddressTypeIPv4,
		Ports:       []discovery.EndpointPort{{Name: new(""), Port: new(int32(8080))}},
	}
	for i, n := range nodes {
		s.Endpoints = append(s.Endpoints, discovery.Endpoint{Addresses: []string{fmt.Sprint("10.0.0.", i+1)}, NodeName: &n})
	}
	return s
}

// must panics on an error.
func must[T any](x T, err error) T {
	if err != nil {
		panic(err)
	}
	return x
}

// newEngine returns a synced tracker and its engine.
func newEngine(c tracker.Config) (*tracker.Tracker, *ruleset.Engine) {
	t := must(tracker.New(c))
	t.MarkSynced(tracker.KindServices, tracker.KindSlices, tracker.KindNodes)
	return t, must(ruleset.NewEngine(ruleset.Config{Source: t}))
}
