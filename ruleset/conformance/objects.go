package conformance

import (
	"cmp"
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
	// number chooses its cluster IPs, external IPs and load-balancer IPs.
	number int
	kind   v1.ServiceType // "" is ClusterIP
	ports  []port         // nil is one TCP port 80
	// Whether it has external and load-balancer IPs.
	externalIPs, loadBalancerIPs bool
	// externalNumber, if not 0, chooses the external IPs in place of number.
	externalNumber int
	// externalAt, if not nil, chooses the external IPs in place of externalIP.
	externalAt    func(n, port int) target
	created       int64 // seconds since 1970, 0 for not set
	ipMode        v1.LoadBalancerIPMode
	sources       []string
	internalLocal bool
	externalLocal bool
	preferLocal   bool
	pass          bool
	affinity      int32 // seconds, 0 for none
	hash          tracker.Hash
	endpoints     []endpoint
	// endpointsIn lists the families that have the endpoints, nil for all.
	endpointsIn []tracker.Family
}

// port is a Service port.
type port struct {
	name     string
	protocol v1.Protocol // "" is TCP
	port     int32       // 0 is 80
	nodePort int32
	target   int32 // 0 is podPort
	// last, if not 0, makes the port a range, and firstTarget shifts it.
	last, firstTarget uint16
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

// on returns ready endpoints on the named pods.
func on(pods ...string) []endpoint {
	out := make([]endpoint, 0, len(pods))
	for _, p := range pods {
		out = append(out, endpoint{pod: p})
	}
	return out
}

// complete fills in the defaults.
func (s service) complete() *service {
	s.kind = cmp.Or(s.kind, v1.ServiceTypeClusterIP)
	if s.ports == nil {
		s.ports = []port{{}}
	}
	s.ports = slices.Clone(s.ports)
	for i := range s.ports {
		p := &s.ports[i]
		p.protocol, p.port, p.target = cmp.Or(p.protocol, tcp), cmp.Or(p.port, 80), cmp.Or(p.target, podPort)
	}
	if s.externalAt == nil {
		s.externalAt = externalIP
	}
	s.externalNumber = cmp.Or(s.externalNumber, s.number)
	return &s
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
		if s.externalIPs {
			o.Spec.ExternalIPs = append(o.Spec.ExternalIPs, s.externalAt(s.externalNumber, 0).at(f).Addr().String())
		}
		if s.loadBalancerIPs {
			in := v1.LoadBalancerIngress{IP: loadBalancerIP(s.number, 0).at(f).Addr().String()}
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
	if s.pass {
		worldgen.SetPass(o)
	}
	for _, p := range s.ports {
		if p.last != 0 {
			worldgen.SetPortRange(o, p.name, uint16(p.port), p.last, p.firstTarget)
		}
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
