package tracker_test

import (
	"net/netip"

	v1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/go-proxier/proxier/tracker"
)

func ptr[T any](v T) *T { return &v }

func addr(s string) netip.Addr { return netip.MustParseAddr(s) }

func named(name string) types.NamespacedName {
	return types.NamespacedName{Namespace: "ns", Name: name}
}

// service returns a ClusterIP Service with one TCP port "http", 80.
func service(namespace, name, ip string) *v1.Service {
	s := &v1.Service{
		ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: name},
		Spec: v1.ServiceSpec{
			Type:       v1.ServiceTypeClusterIP,
			ClusterIP:  ip,
			ClusterIPs: []string{ip},
			IPFamilies: []v1.IPFamily{v1.IPv4Protocol},
			Ports:      []v1.ServicePort{{Name: "http", Protocol: v1.ProtocolTCP, Port: 80}},
		},
	}
	if a, err := netip.ParseAddr(ip); err == nil && a.Is6() {
		s.Spec.IPFamilies[0] = v1.IPv6Protocol
	}
	return s
}

// slice returns an IPv4 EndpointSlice with the port "http", 8080, and no
// endpoints.
func slice(namespace, name, owner string) *discovery.EndpointSlice {
	return &discovery.EndpointSlice{
		ObjectMeta: metav1.ObjectMeta{
			Namespace: namespace, Name: name,
			Labels: map[string]string{discovery.LabelServiceName: owner},
		},
		AddressType: discovery.AddressTypeIPv4,
		Ports:       []discovery.EndpointPort{{Name: ptr("http"), Protocol: ptr(v1.ProtocolTCP), Port: ptr(int32(8080))}},
	}
}

// with adds ready endpoints on node-1 to a slice.
func with(s *discovery.EndpointSlice, addrs ...string) *discovery.EndpointSlice {
	for _, a := range addrs {
		s.Endpoints = append(s.Endpoints, discovery.Endpoint{Addresses: []string{a}, NodeName: ptr("node-1")})
	}
	return s
}

func key(service, port string, f tracker.Family) tracker.Key {
	return tracker.Key{
		ServicePortName: tracker.ServicePortName{NamespacedName: named(service), Port: port, Protocol: v1.ProtocolTCP},
		Family:          f,
	}
}
