package endpointslice

import (
	"fmt"
	"testing"

	discovery "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// TestProductOfASliceIsBounded has a slice of 1,000 addresses and 1,000 ports.
func TestProductOfASliceIsBounded(t *testing.T) {
	var reported []LeftOut
	cache := New(Plain(func(_ *discovery.EndpointSlice, left []LeftOut) { reported = left }))
	s := &discovery.EndpointSlice{AddressType: discovery.AddressTypeIPv4, ObjectMeta: metav1.ObjectMeta{
		Namespace: "ns", Name: "a", Labels: map[string]string{discovery.LabelServiceName: "a"}}}
	for i := range 1000 {
		name, port := fmt.Sprintf("p%03d", i), int32(1000+i)
		s.Ports = append(s.Ports, discovery.EndpointPort{Name: &name, Port: &port})
		s.Endpoints = append(s.Endpoints, discovery.Endpoint{Addresses: []string{fmt.Sprintf("10.0.%d.%d", i/250, i%250)}})
	}
	if !cache.Set(s) || len(reported) != 1 || reported[0].Reason != ReasonLimitExceeded {
		t.Fatalf("reported %v", reported)
	}
	changes := cache.Take()
	if len(changes) != 1 || len(changes[0].New) != maxEndpoints/1000 || changes[0].New[0].Name != "p000" || len(changes[0].New[0].Endpoints) != 1000 {
		t.Fatalf("%d ports", len(changes[0].New))
	}
	reported = nil
	s.Ports = s.Ports[:maxEndpoints/1000]
	if cache.Set(s) || reported != nil {
		t.Errorf("the same ports are a change, or reported: %v", reported)
	}
}
