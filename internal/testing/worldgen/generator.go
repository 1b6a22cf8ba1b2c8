package worldgen

import (
	"cmp"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"slices"

	v1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/go-proxier/proxier/tracker"
)

// Params holds the parameters of a world.
type Params struct {
	// Families lists the families of addresses.
	Families []tracker.Family
	// Node is the node. Some steps change its zone.
	Node tracker.NodeInfo
	// Backends lists the servers from which endpoints are chosen, at least one.
	Backends []Backend
	// ClusterIP, ExternalIP and LoadBalancerIP return the n-th address of a kind, for
	// n from 1 to a few dozen.
	ClusterIP, ExternalIP, LoadBalancerIP func(f tracker.Family, n int) netip.Addr
	// Sources lists the ranges from which loadBalancerSourceRanges are chosen. Nil
	// means no source ranges.
	Sources []string
	// Protocols lists the protocols in use, at least one.
	Protocols []v1.Protocol
	// Affinity gives some Services sessionAffinity ClientIP.
	Affinity bool
	// Weights gives some endpoints weights. Hash gives some Services a hash.
	Weights, Hash bool
	// Services is the maximum number of Services, 0 for 6.
	Services int
}

// Backend is a server that can be an endpoint.
type Backend struct {
	// Node is the name of its node.
	Node string
	// Addr returns its address.
	Addr func(tracker.Family) netip.Addr
	// Ports lists the ports that it serves, in every protocol.
	Ports []uint16
}

// Generator generates a world and changes of it. It is not safe for concurrent use.
// [New] returns a Generator; the zero value is not usable.
type Generator struct {
	p   Params
	rng *rand.Rand
	// services and slices hold the current objects by name.
	services map[string]*v1.Service
	slices   map[string]*discovery.EndpointSlice
	node     tracker.NodeInfo
}

// New returns a Generator. Its results depend on the arguments alone.
func New(seed uint64, p Params) *Generator {
	p.Services = cmp.Or(p.Services, 6)
	return &Generator{p: p, rng: rand.New(rand.NewPCG(seed, 0x70726f78)), services: map[string]*v1.Service{}, slices: map[string]*discovery.EndpointSlice{}, node: p.Node}
}

const namespace = "world"

func name(i int) string { return fmt.Sprintf("svc-%d", i) }

// ports returns the maximum number of ports of Service i. Some Services have many.
func ports(i int) int {
	if i%6 == 5 {
		return 20
	}
	return 2
}

// chance returns true with probability 1/n.
func (g *Generator) chance(n int) bool { return g.rng.IntN(n) == 0 }

// Start returns the changes that create the first state of the world. It must be
// called once, before Step.
func (g *Generator) Start() []Op {
	var out []Op
	for i := range g.p.Services {
		if !g.chance(6) {
			out = append(out, g.setService(i))
		}
		out = append(out, g.setSlices(i)...)
	}
	return out
}

// Step returns a few changes to apply together. Their objects must not be modified.
func (g *Generator) Step() []Op {
	var out []Op
	for range 1 + g.rng.IntN(4) {
		i := g.rng.IntN(g.p.Services)
		switch g.rng.IntN(10) {
		case 0, 1, 2:
			out = append(out, g.setService(i))
		case 3:
			if g.services[name(i)] != nil {
				delete(g.services, name(i))
				out = append(out, Op{DeleteService: &types.NamespacedName{Namespace: namespace, Name: name(i)}})
			}
		case 4:
			out = append(out, g.setNode())
		case 5:
			// Two Services swap their specifications.
			j := g.rng.IntN(g.p.Services)
			if a, b := g.services[name(i)], g.services[name(j)]; a != nil && b != nil && i != j {
				a, b = a.DeepCopy(), b.DeepCopy()
				a.Spec, b.Spec, a.Status, b.Status = b.Spec, a.Spec, b.Status, a.Status
				g.services[a.Name], g.services[b.Name] = a, b
				out = append(out, Op{SetService: a}, Op{SetService: b})
			}
		default:
			out = append(out, g.setSlices(i)...)
		}
	}
	return out
}

func (g *Generator) setNode() Op {
	g.node.Zone = []string{"zone-a", "zone-b", ""}[g.rng.IntN(3)]
	n := g.node
	return Op{SetNode: &n}
}

// setService generates Service i, new or changed.
func (g *Generator) setService(i int) Op {
	s := &v1.Service{
		ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: name(i)},
		Spec:       v1.ServiceSpec{Type: v1.ServiceTypeClusterIP},
	}
	switch g.rng.IntN(5) {
	case 0, 1:
		s.Spec.Type = v1.ServiceTypeNodePort
	case 2, 3:
		s.Spec.Type = v1.ServiceTypeLoadBalancer
	}
	families := slices.Clone(g.p.Families)
	if len(families) > 1 && g.chance(4) {
		families = families[g.rng.IntN(2):][:1]
	}
	// Several Services ask for the same external addresses.
	external, balancer := 1+g.rng.IntN(3), 1+g.rng.IntN(3)
	hasExternal := g.chance(3)
	for _, f := range families {
		s.Spec.IPFamilies = append(s.Spec.IPFamilies, v1.IPFamily(f.String()))
		s.Spec.ClusterIPs = append(s.Spec.ClusterIPs, g.p.ClusterIP(f, i+1).String())
		if hasExternal {
			s.Spec.ExternalIPs = append(s.Spec.ExternalIPs, g.p.ExternalIP(f, external).String())
			if external == balancer { // and sometimes for another's load-balancer IP
				s.Spec.ExternalIPs = append(s.Spec.ExternalIPs, g.p.LoadBalancerIP(f, external).String())
			}
		}
		if s.Spec.Type == v1.ServiceTypeLoadBalancer && !g.chance(5) {
			in := v1.LoadBalancerIngress{IP: g.p.LoadBalancerIP(f, balancer).String()}
			if g.chance(6) {
				mode := v1.LoadBalancerIPModeProxy
				in.IPMode = &mode
			}
			s.Status.LoadBalancer.Ingress = append(s.Status.LoadBalancer.Ingress, in)
		}
	}
	s.Spec.ClusterIP = s.Spec.ClusterIPs[0]
	for n := range 1 + g.rng.IntN(ports(i)) {
		p := v1.ServicePort{Name: fmt.Sprintf("p%d", n), Protocol: g.p.Protocols[g.rng.IntN(len(g.p.Protocols))], Port: int32(80 + n)}
		if g.chance(5) {
			p.Port = 80 // the same port, which may also exist with another protocol
		}
		if s.Spec.Type != v1.ServiceTypeClusterIP && !g.chance(8) {
			// Often a NodePort that another Service has with some protocol.
			p.NodePort = int32(30000 + g.rng.IntN(8))
			if g.chance(2) {
				p.NodePort = int32(30100 + 32*i + n)
			}
		}
		s.Spec.Ports = append(s.Spec.Ports, p)
	}
	if s.Spec.Type == v1.ServiceTypeLoadBalancer && g.chance(2) && len(g.p.Sources) != 0 {
		for range 1 + g.rng.IntN(3) {
			s.Spec.LoadBalancerSourceRanges = append(s.Spec.LoadBalancerSourceRanges, g.p.Sources[g.rng.IntN(len(g.p.Sources))])
		}
	}
	if g.chance(3) {
		s.Spec.ExternalTrafficPolicy = v1.ServiceExternalTrafficPolicyLocal
		if s.Spec.Type == v1.ServiceTypeLoadBalancer {
			s.Spec.HealthCheckNodePort = int32(28000 + i) // no NodePort is below 30000
		}
	}
	if g.chance(4) {
		local := v1.ServiceInternalTrafficPolicyLocal
		s.Spec.InternalTrafficPolicy = &local
	}
	if !g.chance(4) { // the time of creation changes if the Service is recreated
		s.CreationTimestamp = metav1.Unix(1e9+int64(g.rng.IntN(4)), 0)
	}
	if g.p.Affinity && g.chance(4) {
		seconds := int32(600 + g.rng.IntN(600))
		s.Spec.SessionAffinity = v1.ServiceAffinityClientIP
		s.Spec.SessionAffinityConfig = &v1.SessionAffinityConfig{ClientIP: &v1.ClientIPConfig{TimeoutSeconds: &seconds}}
	}
	if g.p.Hash && g.chance(4) {
		SetHash(s, tracker.Hash(1+g.rng.IntN(2)))
	}
	if i%5 == 2 {
		SetPreferLocal(s)
	}
	switch g.rng.IntN(20) {
	case 0:
		s.Spec.ClusterIP, s.Spec.ClusterIPs = v1.ClusterIPNone, []string{v1.ClusterIPNone}
	case 1:
		s.Spec.Type, s.Spec.ExternalName = v1.ServiceTypeExternalName, "example.com"
	}
	g.services[s.Name] = s
	return Op{SetService: s}
}

// setSlices generates the endpoints of Service i, in up to two slices per family, and
// sometimes in none.
func (g *Generator) setSlices(i int) []Op {
	var out []Op
	hints, none := g.rng.IntN(6), g.chance(8)
	for _, f := range g.p.Families {
		for n := range 2 {
			id := fmt.Sprintf("%s-%v-%d", name(i), f, n)
			if none || n == 1 && !g.chance(4) {
				if g.slices[id] != nil {
					delete(g.slices, id)
					out = append(out, Op{DeleteSlice: &types.NamespacedName{Namespace: namespace, Name: id}})
				}
				continue
			}
			es := g.slice(i, f, id, hints)
			g.slices[id] = es
			out = append(out, Op{SetSlice: es})
		}
	}
	return out
}

func (g *Generator) slice(i int, f tracker.Family, id string, hints int) *discovery.EndpointSlice {
	es := &discovery.EndpointSlice{
		ObjectMeta:  metav1.ObjectMeta{Namespace: namespace, Name: id, Labels: map[string]string{discovery.LabelServiceName: name(i)}},
		AddressType: discovery.AddressType(f.String()),
	}
	// Every port that the Service may have, with the number of a port that some
	// backends serve.
	any := g.p.Backends[g.rng.IntN(len(g.p.Backends))].Ports
	at := any[g.rng.IntN(len(any))]
	for n := range ports(i) {
		for _, proto := range g.p.Protocols {
			portName, port := fmt.Sprintf("p%d", n), int32(at)
			es.Ports = append(es.Ports, discovery.EndpointPort{Name: &portName, Protocol: &proto, Port: &port})
		}
	}
	count := g.rng.IntN(5)
	terminating, weights := g.chance(8), g.p.Weights && g.chance(3)
	for _, k := range g.rng.Perm(len(g.p.Backends))[:min(count, len(g.p.Backends))] {
		b := g.p.Backends[k]
		if !slices.Contains(b.Ports, at) {
			continue
		}
		ready, serving, ending := true, true, false
		if terminating || g.chance(8) {
			ready, serving, ending = false, !g.chance(4), !g.chance(4)
		}
		ep := discovery.Endpoint{
			Addresses:  []string{b.Addr(f).String()},
			NodeName:   &b.Node,
			Conditions: discovery.EndpointConditions{Ready: &ready, Serving: &serving, Terminating: &ending},
		}
		switch {
		case hints == 0, hints == 1 && g.chance(2):
			ep.Hints = &discovery.EndpointHints{ForZones: []discovery.ForZone{{Name: []string{"zone-a", "zone-b"}[g.rng.IntN(2)]}}}
		case hints == 2:
			ep.Hints = &discovery.EndpointHints{ForNodes: []discovery.ForNode{{Name: b.Node}}}
		}
		es.Endpoints = append(es.Endpoints, ep)
		if weights {
			SetWeight(es, ep.Addresses[0], g.rng.IntN(5))
		}
	}
	return es
}
