//go:build linux

package main

import (
	"fmt"
	"maps"
	"math/rand/v2"
	"net/netip"
	"slices"

	v1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/intstr"
)

// namespace is the namespace of all Services.
const namespace = "default"

// The ranges of addresses and ports.
var (
	serviceCIDRs = []string{"10.96.0.0/16", "fd00:10:96::/112"}
	// The first cluster IPs, external IPs and load-balancer IPs.
	clusterIPs  = [2]string{"10.96.1.0", "fd00:10:96::100"}
	externalIPs = [2]string{"198.18.0.1", "2001:db8:e::1"}
	balancerIPs = [2]string{"198.19.0.1", "2001:db8:b::1"}
	// allowed holds the source ranges of restricted load balancers: the first two clients.
	allowed = []string{"192.0.2.10/31", "2001:db8:1::10/127"}
)

const (
	firstNodePort, lastNodePort = 33000, 60000
	// affinitySeconds is the timeout of session affinity. It is short, because entries must
	// have expired at the end.
	affinitySeconds int32 = 10
	// barrierID is the id of the Service of [soak.barrier].
	barrierID = 0
)

// kind is the type of a Service.
type kind int

const (
	clusterIP kind = iota
	nodePort
	loadBalancer
	external // with external IPs
	kinds
)

// service is a Service with its endpoints. A committed value must not be changed.
type service struct {
	id   int
	vip  int // determines its addresses
	kind kind
	// udp adds a UDP port of the same number.
	udp  bool
	port int32
	// Ports of the node, or 0. healthPort is for load balancers with externalLocal.
	nodePort, udpNodePort, healthPort int32
	dual                              bool
	externalLocal, internalLocal      bool
	affinity                          bool
	ranges                            bool // only some may use its load balancer
	split                             split
	endpoints                         []endpoint
}

// split is how the endpoints are divided between two slices.
type split int

const (
	// whole: one slice has all endpoints.
	whole split = iota
	// copied: the first slice has all endpoints, the second one the endpoints of odd
	// number, as while endpoints move.
	copied
	// halved: the first slice has the endpoints of even number, the second one the others.
	halved
)

type endpoint struct {
	pod   int
	state state
}

// state stands for an endpoint's conditions.
type state int

const (
	ready state = iota
	terminating
	notReady
)

func (s *service) name() string { return fmt.Sprint("svc-", s.id) }

// clone returns a copy that may be changed.
func (s *service) clone() *service {
	c := *s
	c.endpoints = slices.Clone(s.endpoints)
	return &c
}

// familyCount returns 2 for a dual-stack Service.
func (s *service) familyCount() int {
	if s.dual {
		return 2
	}
	return 1
}

// addr returns the Service's address in one of the ranges of VIPs.
func (s *service) addr(ranges [2]string, f int) netip.Addr { return number(ranges[f], s.vip) }

// object returns the Service object.
func (s *service) object() *v1.Service {
	o := &v1.Service{
		TypeMeta:   metav1.TypeMeta{APIVersion: "v1", Kind: "Service"},
		ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: s.name()},
		Spec:       v1.ServiceSpec{Type: v1.ServiceTypeClusterIP, SessionAffinity: v1.ServiceAffinityNone},
	}
	single := v1.IPFamilyPolicySingleStack
	if s.dual {
		single = v1.IPFamilyPolicyRequireDualStack
	}
	o.Spec.IPFamilyPolicy = &single
	for f := range s.familyCount() {
		o.Spec.IPFamilies = append(o.Spec.IPFamilies, v1.IPFamily(families[f].String()))
		o.Spec.ClusterIPs = append(o.Spec.ClusterIPs, s.addr(clusterIPs, f).String())
		switch s.kind {
		case external:
			o.Spec.ExternalIPs = append(o.Spec.ExternalIPs, s.addr(externalIPs, f).String())
		case loadBalancer:
			o.Status.LoadBalancer.Ingress = append(o.Status.LoadBalancer.Ingress, v1.LoadBalancerIngress{IP: s.addr(balancerIPs, f).String()})
			if s.ranges {
				o.Spec.LoadBalancerSourceRanges = append(o.Spec.LoadBalancerSourceRanges, allowed[f])
			}
		}
	}
	o.Spec.ClusterIP = o.Spec.ClusterIPs[0]
	o.Spec.Ports = []v1.ServicePort{{Name: "tcp", Protocol: v1.ProtocolTCP, Port: s.port, TargetPort: intstr.FromInt32(podPort), NodePort: s.nodePort}}
	if s.udp {
		o.Spec.Ports = append(o.Spec.Ports, v1.ServicePort{Name: "udp", Protocol: v1.ProtocolUDP, Port: s.port, TargetPort: intstr.FromInt32(podPort), NodePort: s.udpNodePort})
	}
	switch s.kind {
	case nodePort:
		o.Spec.Type = v1.ServiceTypeNodePort
	case loadBalancer:
		o.Spec.Type = v1.ServiceTypeLoadBalancer
		if s.externalLocal {
			o.Spec.HealthCheckNodePort = s.healthPort
		}
	}
	if s.kind != clusterIP {
		o.Spec.ExternalTrafficPolicy = v1.ServiceExternalTrafficPolicyCluster
		if s.externalLocal {
			o.Spec.ExternalTrafficPolicy = v1.ServiceExternalTrafficPolicyLocal
		}
	}
	if s.internalLocal {
		p := v1.ServiceInternalTrafficPolicyLocal
		o.Spec.InternalTrafficPolicy = &p
	}
	if s.affinity {
		o.Spec.SessionAffinity = v1.ServiceAffinityClientIP
		seconds := affinitySeconds
		o.Spec.SessionAffinityConfig = &v1.SessionAffinityConfig{ClientIP: &v1.ClientIPConfig{TimeoutSeconds: &seconds}}
	}
	return o
}

// slices returns the EndpointSlices.
func (s *service) slices() []*discovery.EndpointSlice {
	var out []*discovery.EndpointSlice
	ports := s.object().Spec.Ports
	parts := [][]endpoint{s.endpoints}
	if s.split != whole {
		parts = append(parts, slices.DeleteFunc(slices.Clone(s.endpoints), func(e endpoint) bool { return e.pod%2 == 0 }))
	}
	if s.split == halved {
		parts[0] = slices.DeleteFunc(slices.Clone(s.endpoints), func(e endpoint) bool { return e.pod%2 == 1 })
	}
	for f := range s.familyCount() {
		for i, part := range parts {
			es := &discovery.EndpointSlice{
				TypeMeta: metav1.TypeMeta{APIVersion: "discovery.k8s.io/v1", Kind: "EndpointSlice"},
				ObjectMeta: metav1.ObjectMeta{
					Namespace: namespace, Name: fmt.Sprintf("%s-%s-%d", s.name(), []string{"v4", "v6"}[f], i),
					Labels: map[string]string{discovery.LabelServiceName: s.name()},
				},
				AddressType: discovery.AddressType(families[f].String()),
				Endpoints:   []discovery.Endpoint{},
			}
			for _, p := range ports {
				number := int32(podPort)
				es.Ports = append(es.Ports, discovery.EndpointPort{Name: &p.Name, Protocol: &p.Protocol, Port: &number})
			}
			for _, e := range part {
				node, isReady, serving, terminating := nodeOf(e.pod), e.state == ready, e.state != notReady, e.state == terminating
				es.Endpoints = append(es.Endpoints, discovery.Endpoint{
					Addresses: []string{podAddr(e.pod, f).String()}, NodeName: &node,
					Conditions: discovery.EndpointConditions{Ready: &isReady, Serving: &serving, Terminating: &terminating},
				})
			}
			out = append(out, es)
		}
	}
	return out
}

// targets returns every address and port at which the Service is reached.
func (s *service) targets() []target {
	var out []target
	protos := []v1.Protocol{v1.ProtocolTCP}
	if s.udp {
		protos = append(protos, v1.ProtocolUDP)
	}
	for f := range s.familyCount() {
		for _, p := range protos {
			out = append(out, target{netip.AddrPortFrom(s.addr(clusterIPs, f), uint16(s.port)), p})
			switch s.kind {
			case external:
				out = append(out, target{netip.AddrPortFrom(s.addr(externalIPs, f), uint16(s.port)), p})
			case loadBalancer:
				out = append(out, target{netip.AddrPortFrom(s.addr(balancerIPs, f), uint16(s.port)), p})
			}
			n := s.nodePort
			if p == v1.ProtocolUDP {
				n = s.udpNodePort
			}
			if n != 0 {
				out = append(out, target{netip.AddrPortFrom(nodeAddresses[f][0], uint16(n)), p})
			}
		}
	}
	return out
}

// population creates and holds the Services. It is not safe for concurrent use.
type population struct {
	rng  *rand.Rand
	each int // endpoints of a Service, on average
	// now holds the last committed Services by id. first holds the Services at the
	// beginning.
	now, first map[int]*service
	// ids holds the ids of the Services in now in the order of creation, for random choices.
	ids    []int
	nextID int
	// freeVIPs and freePorts can be used again.
	freeVIPs  []int
	freePorts []int32
	nextVIP   int
	nextPort  int32
}

func newPopulation(rng *rand.Rand, each int) *population {
	return &population{rng: rng, each: each, now: map[int]*service{}, nextID: barrierID + 1, nextVIP: 1, nextPort: firstNodePort}
}

// barrier returns the Service of the n-th barrier. Its port and its endpoint differ from the
// port and the endpoint of the barrier before.
func (p *population) barrier(n int) *service {
	return &service{id: barrierID, dual: true, port: int32(10000 + n%20000), endpoints: []endpoint{{pod: n % localPods}}}
}

func (p *population) takePort() int32 {
	// Sometimes reuse a port.
	if n := len(p.freePorts); n > 0 && (p.rng.IntN(2) == 0 || p.nextPort > lastNodePort) {
		i := p.rng.IntN(n)
		port := p.freePorts[i]
		p.freePorts = slices.Delete(p.freePorts, i, i+1)
		return port
	}
	p.nextPort++
	return p.nextPort - 1
}

// One in so many Services has the kind or property.
const (
	perNodePort, perLoadBalancer, perExternal = 8, 16, 32
	perDual, perUDP, perAffinity              = 4, 8, 10
	perExternalLocal, perInternalLocal        = 3, 25
	perRanges, perEmpty, perSplit             = 4, 50, 20
)

// create returns a new random Service.
func (p *population) create() *service {
	one := func(of int) bool { return p.rng.IntN(of) == 0 }
	s := &service{id: p.nextID, port: 80}
	p.nextID++
	if n := len(p.freeVIPs); n > 0 && one(2) {
		i := p.rng.IntN(n)
		s.vip = p.freeVIPs[i]
		p.freeVIPs = slices.Delete(p.freeVIPs, i, i+1)
	} else {
		s.vip = p.nextVIP
		p.nextVIP++
	}
	s.dual, s.udp, s.affinity = one(perDual), one(perUDP), one(perAffinity)
	if one(perSplit) {
		s.split = halved
	}
	switch {
	case one(perNodePort):
		s.kind = nodePort
	case one(perLoadBalancer):
		s.kind = loadBalancer
	case one(perExternal):
		s.kind = external
	}
	p.setKind(s, s.kind)
	s.internalLocal = one(perInternalLocal)
	n := 1 + p.rng.IntN(2*p.each-1)
	if one(perEmpty) {
		n = 0
	}
	p.resize(s, n)
	return s
}

// setKind gives the Service the ports and policies of a kind. A health-check port that the
// Service had stays: the API server refuses another one.
func (p *population) setKind(s *service, k kind) {
	healthPort := s.healthPort
	s.kind, s.nodePort, s.udpNodePort, s.healthPort, s.externalLocal, s.ranges = k, 0, 0, 0, false, false
	if k == nodePort || k == loadBalancer {
		s.nodePort = p.takePort()
		if s.udp {
			s.udpNodePort = p.takePort()
		}
	}
	if k != clusterIP {
		s.externalLocal = p.rng.IntN(perExternalLocal) == 0
	}
	if k == loadBalancer {
		if s.externalLocal {
			s.healthPort = healthPort
			if healthPort == 0 {
				s.healthPort = p.takePort()
			}
		}
		s.ranges = p.rng.IntN(perRanges) == 0
	}
}

// newPod returns a random pod that the Service does not have. One in eight is on this node.
func (p *population) newPod(s *service) int {
	for {
		pod := localPods + p.rng.IntN(farPods)
		if p.rng.IntN(8) == 0 {
			pod = p.rng.IntN(localPods)
		}
		if !slices.ContainsFunc(s.endpoints, func(e endpoint) bool { return e.pod == pod }) {
			return pod
		}
	}
}

// resize gives the Service n endpoints. It keeps the first ones and adds ready ones.
func (p *population) resize(s *service, n int) {
	s.endpoints = s.endpoints[:min(n, len(s.endpoints))]
	for len(s.endpoints) < n {
		s.endpoints = append(s.endpoints, endpoint{pod: p.newPod(s)})
	}
}

// pick returns n different random Services, or all if there are fewer.
func (p *population) pick(n int) []*service {
	var out []*service
	for _, i := range p.rng.Perm(len(p.ids))[:min(n, len(p.ids))] {
		out = append(out, p.now[p.ids[i]])
	}
	return out
}

// keepFirst stores the Services for [soak.restore].
func (p *population) keepFirst() {
	p.first = maps.Clone(p.now)
	delete(p.first, barrierID)
}

// ports returns the ports of the node that the Service uses.
func (s *service) ports() []int32 {
	if s == nil {
		return nil
	}
	return slices.DeleteFunc([]int32{s.nodePort, s.udpNodePort, s.healthPort}, func(n int32) bool { return n == 0 })
}

// note stores a committed Service; nil deletes it. The addresses and ports that the Service
// no longer uses become free.
func (p *population) note(id int, s *service) {
	old := p.now[id]
	for _, port := range old.ports() {
		if !slices.Contains(s.ports(), port) {
			p.freePorts = append(p.freePorts, port)
		}
	}
	switch {
	case s == nil:
		delete(p.now, id)
		p.ids = slices.DeleteFunc(p.ids, func(i int) bool { return i == id })
		p.freeVIPs = append(p.freeVIPs, old.vip)
		return
	case old == nil && id != barrierID:
		p.ids = append(p.ids, id)
	}
	p.now[id] = s
}
