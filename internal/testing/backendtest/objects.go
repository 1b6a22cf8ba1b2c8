package backendtest

import (
	"fmt"
	"math/rand/v2"
	"net/netip"
	"strings"

	v1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/go-proxier/proxier/tracker"
)

// targetPort is the port of every endpoint of [Slice].
const targetPort = 8080

// Service returns a dual-stack ClusterIP Service with TCP port 80 of the given name, and
// with the edits made.
func Service(name types.NamespacedName, portName, clusterIP4, clusterIP6 string, edits ...func(*v1.Service)) *v1.Service {
	s := &v1.Service{
		ObjectMeta: metav1.ObjectMeta{Namespace: name.Namespace, Name: name.Name},
		Spec: v1.ServiceSpec{
			Type: v1.ServiceTypeClusterIP, ClusterIP: clusterIP4, ClusterIPs: []string{clusterIP4, clusterIP6},
			IPFamilies: []v1.IPFamily{v1.IPv4Protocol, v1.IPv6Protocol},
			Ports:      []v1.ServicePort{{Name: portName, Protocol: v1.ProtocolTCP, Port: 80}},
		},
	}
	for _, e := range edits {
		e(s)
	}
	return s
}

// Endpoint returns a ready endpoint on a node.
func Endpoint(addr, node string) discovery.Endpoint {
	return discovery.Endpoint{Addresses: []string{addr}, NodeName: &node}
}

// Slice returns an EndpointSlice of a Service, with port 8080.
func Slice(service types.NamespacedName, suffix string, f tracker.Family, portName string, p v1.Protocol, endpoints ...discovery.Endpoint) *discovery.EndpointSlice {
	port := int32(targetPort)
	return &discovery.EndpointSlice{
		ObjectMeta: metav1.ObjectMeta{
			Namespace: service.Namespace, Name: service.Name + "-" + suffix,
			Labels: map[string]string{discovery.LabelServiceName: service.Name},
		},
		AddressType: discovery.AddressType(f.String()),
		Ports:       []discovery.EndpointPort{{Name: &portName, Protocol: &p, Port: &port}},
		Endpoints:   endpoints,
	}
}

// AddPods adds n of the pods, which are addresses with ports, to the slice in random
// order. The slice gets the port of the last one.
func AddPods(s *discovery.EndpointSlice, pods []string, n int, rng *rand.Rand) {
	for _, i := range rng.Perm(len(pods))[:n] {
		a := netip.MustParseAddrPort(pods[i])
		port := int32(a.Port())
		s.Ports[0].Port = &port
		s.Endpoints = append(s.Endpoints, discovery.Endpoint{Addresses: []string{a.Addr().String()}})
	}
}

// NodePort returns an edit that makes a NodePort Service.
func NodePort(port int32) func(*v1.Service) {
	return func(s *v1.Service) {
		s.Spec.Type = v1.ServiceTypeNodePort
		s.Spec.Ports[0].NodePort = port
	}
}

// Over returns an edit that sets the protocol.
func Over(p v1.Protocol) func(*v1.Service) {
	return func(s *v1.Service) { s.Spec.Ports[0].Protocol = p }
}

// ExternalIPs returns an edit that sets the external IPs.
func ExternalIPs(ips ...string) func(*v1.Service) {
	return func(s *v1.Service) { s.Spec.ExternalIPs = ips }
}

// Affinity returns an edit that sets sessionAffinity ClientIP with a timeout.
func Affinity(seconds int32) func(*v1.Service) {
	return func(s *v1.Service) {
		s.Spec.SessionAffinity = v1.ServiceAffinityClientIP
		s.Spec.SessionAffinityConfig = &v1.SessionAffinityConfig{ClientIP: &v1.ClientIPConfig{TimeoutSeconds: &seconds}}
	}
}

// ExternalLocal sets externalTrafficPolicy Local.
func ExternalLocal(s *v1.Service) {
	s.Spec.ExternalTrafficPolicy = v1.ServiceExternalTrafficPolicyLocal
}

// InternalLocal sets internalTrafficPolicy Local.
func InternalLocal(s *v1.Service) {
	p := v1.ServiceInternalTrafficPolicyLocal
	s.Spec.InternalTrafficPolicy = &p
}

// FirstDifference returns the first line in which two texts differ.
func FirstDifference(got, want string) string {
	g, w := strings.Split(got, "\n"), strings.Split(want, "\n")
	for i := range min(len(g), len(w)) {
		if g[i] != w[i] {
			return fmt.Sprintf("line %d: %s\nwant    %s", i+1, g[i], w[i])
		}
	}
	return fmt.Sprintf("%d lines, want %d", len(g), len(w))
}
