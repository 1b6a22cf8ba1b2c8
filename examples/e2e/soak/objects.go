//go:build linux

package main

import (
	"fmt"
	"math/rand/v2"
	"net/netip"
	"slices"
	"strings"
	"sync"

	v1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/intstr"
)

const (
	// namespace is the namespace of all Services.
	namespace = "default"
	// firstNodePort and firstHealthPort are the ports of slot 0. Each slot has one of each.
	firstNodePort, firstHealthPort, lastNodePort = 33000, 46000, 60000
	// affinitySeconds is the timeout of session affinity. It is short, because entries must
	// have expired at the end.
	affinitySeconds int32 = 10
	// spareSlots is the number of slots that no Service uses. A new Service often gets the
	// addresses of a deleted one.
	spareSlots = 100
)

// The ranges of addresses, and the addresses of slot 0.
var (
	serviceCIDRs = []string{"10.96.0.0/16", "fd00:10:96::/112"}
	clusterIPs   = [2]string{"10.96.1.0", "fd00:10:96::100"}
	externalIPs  = [2]string{"198.18.0.0", "2001:db8:e::"}
	balancerIPs  = [2]string{"198.19.0.0", "2001:db8:b::"}
	// allowed holds the source ranges of restricted load balancers: the first two clients.
	allowed = []string{"192.0.2.10/31", "2001:db8:1::10/127"}
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
	id, slot int // the slot determines its addresses and node ports
	kind     kind
	port     int32
	// udp adds a UDP port of the same number. ranges restricts the load balancer's clients.
	udp, dual, affinity, ranges  bool
	externalLocal, internalLocal bool
	endpoints                    []endpoint
}

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

// families returns the Service's families, as indices of [families].
func (s *service) families() int {
	if s.dual {
		return 2
	}
	return 1
}

// addr returns the Service's address in one of the ranges.
func (s *service) addr(ranges [2]string, f int) netip.Addr { return number(ranges[f], s.slot) }

// nodePort returns the Service's NodePort, or 0.
func (s *service) nodePort() int32 {
	if s.kind == nodePort || s.kind == loadBalancer {
		return int32(firstNodePort + s.slot)
	}
	return 0
}

// protocols returns the protocols of the Service's ports.
func (s *service) protocols() []v1.Protocol {
	if s.udp {
		return []v1.Protocol{v1.ProtocolTCP, v1.ProtocolUDP}
	}
	return []v1.Protocol{v1.ProtocolTCP}
}

// object returns the Service object.
func (s *service) object() *v1.Service {
	o := &v1.Service{
		TypeMeta:   metav1.TypeMeta{APIVersion: "v1", Kind: "Service"},
		ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: s.name()},
		Spec:       v1.ServiceSpec{Type: v1.ServiceTypeClusterIP, SessionAffinity: v1.ServiceAffinityNone, IPFamilyPolicy: new(v1.IPFamilyPolicySingleStack)},
	}
	if s.dual {
		o.Spec.IPFamilyPolicy = new(v1.IPFamilyPolicyRequireDualStack)
	}
	for f := range s.families() {
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
	for _, p := range s.protocols() {
		o.Spec.Ports = append(o.Spec.Ports, v1.ServicePort{Name: strings.ToLower(string(p)), Protocol: p, Port: s.port, TargetPort: intstr.FromInt32(podPort), NodePort: s.nodePort()})
	}
	switch s.kind {
	case nodePort:
		o.Spec.Type = v1.ServiceTypeNodePort
	case loadBalancer:
		o.Spec.Type = v1.ServiceTypeLoadBalancer
		if s.externalLocal {
			o.Spec.HealthCheckNodePort = int32(firstHealthPort + s.slot)
		}
	}
	if s.kind != clusterIP {
		o.Spec.ExternalTrafficPolicy = v1.ServiceExternalTrafficPolicyCluster
		if s.externalLocal {
			o.Spec.ExternalTrafficPolicy = v1.ServiceExternalTrafficPolicyLocal
		}
	}
	if s.internalLocal {
		o.Spec.InternalTrafficPolicy = new(v1.ServiceInternalTrafficPolicyLocal)
	}
	if s.affinity {
		o.Spec.SessionAffinity = v1.ServiceAffinityClientIP
		o.Spec.SessionAffinityConfig = &v1.SessionAffinityConfig{ClientIP: &v1.ClientIPConfig{TimeoutSeconds: new(affinitySeconds)}}
	}
	return o
}

// slices returns the EndpointSlices.
func (s *service) slices() []*discovery.EndpointSlice {
	var out []*discovery.EndpointSlice
	for f := range s.families() {
		es := &discovery.EndpointSlice{
			TypeMeta: metav1.TypeMeta{APIVersion: "discovery.k8s.io/v1", Kind: "EndpointSlice"},
			ObjectMeta: metav1.ObjectMeta{
				Namespace: namespace, Name: s.name() + []string{"-v4", "-v6"}[f], Labels: map[string]string{discovery.LabelServiceName: s.name()},
			},
			AddressType: discovery.AddressType(families[f].String()),
		}
		for _, p := range s.protocols() {
			es.Ports = append(es.Ports, discovery.EndpointPort{Name: new(strings.ToLower(string(p))), Protocol: new(p), Port: new(int32(podPort))})
		}
		for _, e := range s.endpoints {
			es.Endpoints = append(es.Endpoints, discovery.Endpoint{
				Addresses: []string{podAddr(e.pod, f).String()}, NodeName: new(nodeOf(e.pod)),
				Conditions: discovery.EndpointConditions{Ready: new(e.state == ready), Serving: new(e.state != notReady), Terminating: new(e.state == terminating)},
			})
		}
		out = append(out, es)
	}
	return out
}

// targets returns every address and port at which the Service is reached.
func (s *service) targets() []target {
	var out []target
	for f := range s.families() {
		for _, p := range s.protocols() {
			add := func(a netip.Addr, port int32) { out = append(out, target{netip.AddrPortFrom(a, uint16(port)), p}) }
			add(s.addr(clusterIPs, f), s.port)
			switch s.kind {
			case external:
				add(s.addr(externalIPs, f), s.port)
			case loadBalancer:
				add(s.addr(balancerIPs, f), s.port)
			}
			if n := s.nodePort(); n != 0 {
				add(nodeAddresses[f][0], n)
			}
		}
	}
	return out
}

// change replaces the Service old by now. Either may be nil.
type change struct{ old, now *service }

// either returns one of the two.
func (c change) either() *service {
	if c.now != nil {
		return c.now
	}
	return c.old
}

// population creates and holds the Services. Only pick and serves may be called concurrently.
type population struct {
	rng    *rand.Rand
	nextID int
	free   []int // slots

	mu sync.Mutex
	// now holds the committed Services by id, and ids their ids in the order of creation.
	now map[int]*service
	ids []int
	// hot holds the Services that were changed last. Half of all connections go there, also to
	// deleted ones.
	hot []*service
}

// hotServices is the number of hot Services.
const hotServices = 100

func newPopulation(rng *rand.Rand, services int) *population {
	p := &population{rng: rng, now: map[int]*service{}}
	for slot := range services + spareSlots {
		p.free = append(p.free, slot+1)
	}
	return p
}

// barrier returns the Service of the n-th barrier. Its port and its endpoint differ from the
// port and the endpoint of the barrier before. Its slot and its id are 0.
func barrier(n int) *service {
	return &service{dual: true, port: int32(10000 + n%20000), endpoints: []endpoint{{pod: n % localPods}}}
}

// one reports true once in n times.
func (p *population) one(n int) bool { return p.rng.IntN(n) == 0 }

// create returns a new random Service.
func (p *population) create() *service {
	i := p.rng.IntN(len(p.free))
	p.nextID++
	s := &service{id: p.nextID, slot: p.free[i], port: 80, dual: p.one(4), udp: p.one(8), affinity: p.one(10), internalLocal: p.one(25)}
	p.free = slices.Delete(p.free, i, i+1)
	switch {
	case p.one(8):
		p.setKind(s, nodePort)
	case p.one(16):
		p.setKind(s, loadBalancer)
	case p.one(32):
		p.setKind(s, external)
	}
	if !p.one(50) {
		p.grow(s, 1+p.rng.IntN(2*meanEndpoints-1))
	}
	return s
}

// meanEndpoints is the average number of endpoints of a new Service.
const meanEndpoints = 10

// setKind gives the Service a kind, with random policies.
func (p *population) setKind(s *service, k kind) {
	s.kind, s.externalLocal, s.ranges = k, k != clusterIP && p.one(3), k == loadBalancer && p.one(4)
}

// grow adds n ready endpoints that the Service does not have. One in eight is on this node, while it
// has a pod that is free.
func (p *population) grow(s *service, n int) {
	for n += len(s.endpoints); len(s.endpoints) < n; {
		pod := localPods + p.rng.IntN(farPods)
		if p.one(8) {
			pod = p.rng.IntN(localPods)
		}
		if !slices.ContainsFunc(s.endpoints, func(e endpoint) bool { return e.pod == pod }) {
			s.endpoints = append(s.endpoints, endpoint{pod: pod})
		}
	}
}

// some returns up to most different random Services.
func (p *population) some(most int) []*service {
	var out []*service
	for _, i := range p.rng.Perm(len(p.ids))[:min(1+p.rng.IntN(most), len(p.ids))] {
		out = append(out, p.now[p.ids[i]])
	}
	return out
}

// store stores a committed change.
func (p *population) store(c change) {
	p.mu.Lock()
	defer p.mu.Unlock()
	id := c.either().id
	if c.now == nil {
		delete(p.now, id)
		p.ids = slices.DeleteFunc(p.ids, func(i int) bool { return i == id })
		p.free = append(p.free, c.old.slot)
		return
	}
	p.now[id] = c.now
	if id == 0 {
		return
	}
	if c.old == nil {
		p.ids = append(p.ids, id)
	}
	p.hot = append(p.hot, c.now)
	p.hot = p.hot[max(0, len(p.hot)-hotServices):]
}

// serves reports whether a Service has an endpoint that is not unready.
func (p *population) serves(id int, at netip.AddrPort) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.now[id] != nil && slices.ContainsFunc(p.now[id].endpoints, func(e endpoint) bool {
		return e.state != notReady && at == netip.AddrPortFrom(podAddr(e.pod, familyOf(at.Addr())), podPort)
	})
}

// pick returns a random Service, which may be deleted, and one of its targets.
func (p *population) pick(rng *rand.Rand) (s *service, t target, ok bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	switch {
	case len(p.ids) == 0:
		return nil, t, false
	case rng.IntN(2) == 0:
		s = p.hot[rng.IntN(len(p.hot))]
	default:
		s = p.now[p.ids[rng.IntN(len(p.ids))]]
	}
	list := s.targets()
	return s, list[rng.IntN(len(list))], true
}
