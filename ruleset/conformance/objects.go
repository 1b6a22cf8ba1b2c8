package conformance

import (
	"fmt"
	"slices"

	v1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/intstr"

	"github.com/go-proxier/proxier/internal/testing/worldgen"
	"github.com/go-proxier/proxier/tracker"
)

const namespace = "conformance"

// service is the short form of a Service with its endpoints in a world.
type service struct {
	name string
	// number chooses its cluster IPs.
	number int
	kind   v1.ServiceType
	ports  []port
	// external and loadBalancer are its external and load-balancer IPs.
	external, loadBalancer []target
	created                int64 // seconds since 1970, 0 for not set
	ipMode                 v1.LoadBalancerIPMode
	sources                []string
	internalLocal          bool
	externalLocal          bool
	preferLocal            bool
	affinity               int32 // seconds, 0 for none
	hash                   tracker.Hash
	endpoints              []endpoint
	// endpointsIn lists the families that have the endpoints, nil for all.
	endpointsIn []tracker.Family
}

// port is a Service port.
type port struct {
	name     string
	protocol v1.Protocol
	port     int32
	nodePort int32
	target   int32
}

// endpoint is an endpoint of a Service, with the name of its pod.
type endpoint struct {
	pod string
	// unready and terminating are conditions of the EndpointSlice. An endpoint serves
	// if it is ready or serving is set.
	unready, serving, terminating bool
	zones, nodes                  []string
	weight                        *int // nil is 1
}

func sliceName(service string, f tracker.Family) string { return fmt.Sprintf("%s-%d", service, f) }

// object returns the API object of the Service.
func (s *service) object(families []tracker.Family) *v1.Service {
	o := &v1.Service{
		ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: s.name},
		Spec: v1.ServiceSpec{
			Type:                     s.kind,
			LoadBalancerSourceRanges: s.sources,
		},
	}
	if s.created != 0 {
		o.CreationTimestamp = metav1.Unix(s.created, 0)
	}
	for _, f := range families {
		o.Spec.IPFamilies = append(o.Spec.IPFamilies, v1.IPFamily(f.String()))
		o.Spec.ClusterIPs = append(o.Spec.ClusterIPs, clusterIP(s.number, 0).at(f).Addr().String())
		for _, t := range s.external {
			o.Spec.ExternalIPs = append(o.Spec.ExternalIPs, t.at(f).Addr().String())
		}
		for _, t := range s.loadBalancer {
			in := v1.LoadBalancerIngress{IP: t.at(f).Addr().String()}
			if s.ipMode != "" {
				in.IPMode = &s.ipMode
			}
			o.Status.LoadBalancer.Ingress = append(o.Status.LoadBalancer.Ingress, in)
		}
	}
	o.Spec.ClusterIP = o.Spec.ClusterIPs[0]
	for _, p := range s.ports {
		o.Spec.Ports = append(o.Spec.Ports, v1.ServicePort{
			Name: p.name, Protocol: p.protocol, Port: p.port,
			NodePort: p.nodePort, TargetPort: intstr.FromInt32(p.target),
		})
	}
	if s.internalLocal {
		local := v1.ServiceInternalTrafficPolicyLocal
		o.Spec.InternalTrafficPolicy = &local
	}
	if s.externalLocal {
		o.Spec.ExternalTrafficPolicy = v1.ServiceExternalTrafficPolicyLocal
	}
	worldgen.SetHash(o, s.hash)
	if s.preferLocal {
		worldgen.SetPreferLocal(o)
	}
	if s.affinity != 0 {
		o.Spec.SessionAffinity = v1.ServiceAffinityClientIP
		o.Spec.SessionAffinityConfig = &v1.SessionAffinityConfig{ClientIP: &v1.ClientIPConfig{TimeoutSeconds: &s.affinity}}
	}
	return o
}

// slice returns the EndpointSlice of the Service in one family.
func (s *service) slice(f tracker.Family) *discovery.EndpointSlice {
	o := &discovery.EndpointSlice{
		ObjectMeta: metav1.ObjectMeta{
			Namespace: namespace, Name: sliceName(s.name, f),
			Labels: map[string]string{discovery.LabelServiceName: s.name},
		},
		AddressType: discovery.AddressType(f.String()),
	}
	for _, p := range s.ports {
		o.Ports = append(o.Ports, discovery.EndpointPort{Name: &p.name, Protocol: &p.protocol, Port: &p.target})
	}
	for _, e := range s.endpoints {
		if s.endpointsIn != nil && !slices.Contains(s.endpointsIn, f) {
			continue
		}
		node, addr := podNamed(e.pod)
		ready, serving := !e.unready, !e.unready || e.serving
		out := discovery.Endpoint{
			Addresses:  []string{addr(f).String()},
			NodeName:   &node,
			Conditions: discovery.EndpointConditions{Ready: &ready, Serving: &serving, Terminating: &e.terminating},
		}
		if e.zones != nil || e.nodes != nil {
			out.Hints = &discovery.EndpointHints{}
			for _, z := range e.zones {
				out.Hints.ForZones = append(out.Hints.ForZones, discovery.ForZone{Name: z})
			}
			for _, n := range e.nodes {
				out.Hints.ForNodes = append(out.Hints.ForNodes, discovery.ForNode{Name: n})
			}
		}
		o.Endpoints = append(o.Endpoints, out)
		if e.weight != nil {
			worldgen.SetWeight(o, out.Addresses[0], *e.weight)
		}
	}
	return o
}
