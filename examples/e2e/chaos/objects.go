//go:build linux

package main

import (
	"fmt"
	"math/rand/v2"
	"net/netip"
	"strings"

	v1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"
	networking "k8s.io/api/networking/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/go-proxier/proxier/internal/testing/worldgen"
	"github.com/go-proxier/proxier/tracker"
)

// objects generates the objects of a world and puts them into an API server.
type objects struct {
	rng    *rand.Rand
	gen    *worldgen.Generator
	server *apiServer
	// addresses are those of the Node.
	addresses []v1.NodeAddress
}

// kubernetesIP is the cluster IP of the API server's own Service.
const kubernetesIP = "10.97.0.1"

func newObjects(seed uint64, n int, s *apiServer) *objects {
	var backends []worldgen.Backend
	for i := range pods {
		backends = append(backends, worldgen.Backend{
			Node: fmt.Sprintf("n%d", 1+i/localPods), Ports: podPorts, Addr: func(f tracker.Family) netip.Addr { return podAddr(i)[f] },
		})
	}
	return &objects{
		rng: rand.New(rand.NewPCG(seed, 0x6f626a)), server: s,
		gen: worldgen.New(seed, worldgen.Params{
			Families: []tracker.Family{tracker.IPv4, tracker.IPv6},
			Node:     tracker.NodeInfo{Name: nodeName},
			Backends: backends, Services: n, Affinity: true,
			ClusterIP:      func(f tracker.Family, n int) netip.Addr { return number(n, "10.96.0.0", "fd00:96::")[f] },
			ExternalIP:     func(f tracker.Family, n int) netip.Addr { return number(n, "198.51.100.0", "2001:db8:e::")[f] },
			LoadBalancerIP: func(f tracker.Family, n int) netip.Addr { return number(n, "203.0.113.0", "2001:db8:1b::")[f] },
			Sources:        []string{"192.0.2.0/24", "192.0.0.0/16", "198.18.0.0/15", "10.0.0.0/8", "2001:db8::/32", "2001:db8:5::/64", "0.0.0.0/0", "192.168.50.0/24"},
			Protocols:      []v1.Protocol{v1.ProtocolTCP, v1.ProtocolUDP, v1.ProtocolSCTP},
		}),
	}
}

// start creates the first objects. The API server's own Service always exists, so that every
// agent has something to sync.
func (o *objects) start() {
	o.server.set(services, &v1.Service{
		ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "kubernetes"},
		Spec: v1.ServiceSpec{
			Type: v1.ServiceTypeClusterIP, ClusterIP: kubernetesIP, ClusterIPs: []string{kubernetesIP}, IPFamilies: []v1.IPFamily{v1.IPv4Protocol},
			Ports: []v1.ServicePort{{Name: "https", Port: 443, Protocol: v1.ProtocolTCP}},
		},
	})
	o.setNode("")
	o.apply(o.gen.Start())
}

// step makes a few changes.
func (o *objects) step() {
	switch o.rng.IntN(25) {
	case 0:
		o.server.set(serviceCIDRs, &networking.ServiceCIDR{
			ObjectMeta: metav1.ObjectMeta{Name: pick(o.rng, "k", "l")},
			Spec: networking.ServiceCIDRSpec{CIDRs: pick(o.rng,
				[]string{"10.96.0.0/16"}, []string{"10.96.0.0/16", "fd00:96::/112"}, []string{"10.97.0.0/16"}, []string{"10.96.0.0/24"})},
		})
	case 1:
		o.server.delete(serviceCIDRs, "/k")
	case 2:
		o.server.delete(nodes, "/"+nodeName)
		o.setNode("")
	case 3:
		o.recreate()
	default:
		o.apply(o.gen.Step())
	}
}

// recreate deletes a Service and creates one of the same name.
func (o *objects) recreate() {
	ops := o.gen.Step()
	for _, op := range ops {
		if op.SetService != nil {
			o.server.delete(services, key(op.SetService))
		}
	}
	o.apply(ops)
}

// apply makes changes, with unusual objects among them.
func (o *objects) apply(ops []worldgen.Op) {
	for _, op := range ops {
		switch {
		case op.SetService != nil:
			s := op.SetService.DeepCopy()
			o.mangleService(s)
			o.server.set(services, s)
		case op.SetSlice != nil:
			s := op.SetSlice.DeepCopy()
			o.mangleSlice(s)
			o.server.set(slicesOf, s)
		case op.DeleteService != nil:
			o.server.delete(services, op.DeleteService.String())
		case op.DeleteSlice != nil:
			o.server.delete(slicesOf, op.DeleteSlice.String())
		case op.SetNode != nil:
			o.setNode(op.SetNode.Zone)
		}
	}
}

// deleteServices deletes all Services that worldgen generated.
func (o *objects) deleteServices() {
	for _, name := range o.server.names(services) {
		if name != "default/kubernetes" {
			o.server.delete(services, name)
		}
	}
}

// setNode sets this node's object. At times its addresses change.
func (o *objects) setNode(zone string) {
	if o.rng.IntN(10) == 0 || o.addresses == nil {
		o.addresses = []v1.NodeAddress{
			{Type: v1.NodeHostName, Address: nodeName},
			{Type: v1.NodeInternalIP, Address: pick(o.rng, nodeAddr4, nodeAddr4, otherAddr4)},
			{Type: v1.NodeInternalIP, Address: pick(o.rng, nodeAddr6, otherAddr6)},
			{Type: v1.NodeExternalIP, Address: "192.0.2.99"},
		}[:pick(o.rng, 1, 2, 2, 3, 3, 3, 4, 4)]
	}
	n := &v1.Node{ObjectMeta: metav1.ObjectMeta{Name: nodeName}, Spec: v1.NodeSpec{PodCIDRs: []string{"10.244.0.0/24"}}}
	if zone != "" {
		n.Labels = map[string]string{v1.LabelTopologyZone: zone}
	}
	n.Status.Addresses = o.addresses
	o.server.set(nodes, n)
}

func pick[T any](r *rand.Rand, values ...T) T { return values[r.IntN(len(values))] }

// mangleShare is the share of objects that are mangled: one in so many.
const mangleShare = 5

// mangleService makes some Services unusual or invalid. An API server rejects most of what it
// does, but not all of it: objects may be older than a check.
func (o *objects) mangleService(s *v1.Service) {
	// An API server gives each Service a health-check node port of its own. As long as two have the
	// same, each sync fails in part.
	if o.rng.IntN(20*mangleShare) == 0 {
		s.Spec.Type, s.Spec.ExternalTrafficPolicy = v1.ServiceTypeLoadBalancer, v1.ServiceExternalTrafficPolicyLocal
		s.Spec.HealthCheckNodePort = int32(29100 + o.rng.IntN(2))
	}
	if o.rng.IntN(mangleShare) != 0 {
		return
	}
	r := o.rng
	edits := []func(){
		func() { s.Spec.ExternalIPs = append(s.Spec.ExternalIPs, o.oddAddress()) },
		func() {
			s.Spec.Type = v1.ServiceTypeLoadBalancer
			s.Status.LoadBalancer.Ingress = append(s.Status.LoadBalancer.Ingress, v1.LoadBalancerIngress{IP: o.oddAddress()})
		},
		func() {
			s.Spec.Type = v1.ServiceTypeLoadBalancer
			s.Spec.LoadBalancerSourceRanges = append(s.Spec.LoadBalancerSourceRanges,
				pick(r, "junk", "10.0.0.1/8", "10.0.0.0/33", "::ffff:10.0.0.0/104", " 10.0.0.0/8 ", "::/0"))
		},
		func() {
			s.Spec.ClusterIP = pick(r, "", "::ffff:10.96.0.3", "010.096.000.004", "224.0.0.5", "10.244.0.3")
		},
		func() { s.Spec.ClusterIPs = nil },
		func() { s.Spec.IPFamilies = nil },
		func() { s.Spec.Ports[0].Port = pick[int32](r, 0, -1, 65536, 65535, 1) },
		func() { s.Spec.Ports[0].NodePort = pick[int32](r, -1, 65536, 10249, 22) },
		func() { s.Spec.Ports[0].Protocol = pick[v1.Protocol](r, "", "tcp", "ICMP") },
		func() { s.Spec.Ports[0].Name = pick(r, "", "p1", strings.Repeat("x", 300)) },
		func() { s.Spec.Ports = append(s.Spec.Ports, s.Spec.Ports...) },
		func() { s.Spec.Ports = nil },
		func() {
			s.Spec.SessionAffinity = v1.ServiceAffinityClientIP
			seconds := pick[int32](r, 0, 1, -1, 86400)
			s.Spec.SessionAffinityConfig = &v1.SessionAffinityConfig{ClientIP: &v1.ClientIPConfig{TimeoutSeconds: &seconds}}
		},
		func() {
			s.Annotations = map[string]string{
				"go-proxier.github.io/balance":       pick(r, "source", "source-port", "maglev", "x\n\x1b[2Jy"),
				"go-proxier.github.io/balance-slots": pick(r, "64", "0", "-1", "junk"),
			}
		},
		func() {
			d := pick(r, "PreferClose", "PreferSameNode", "PreferSameZone", "junk")
			s.Spec.TrafficDistribution = &d
		},
		func() { s.Spec.ExternalTrafficPolicy = "junk" },
	}
	// Edits of Services without ports have nothing to edit.
	if len(s.Spec.Ports) != 0 {
		pick(r, edits...)()
	}
}

// mangleSlice makes some slices unusual or invalid.
func (o *objects) mangleSlice(s *discovery.EndpointSlice) {
	if o.rng.IntN(mangleShare) != 0 || len(s.Endpoints) == 0 || len(s.Ports) == 0 {
		return
	}
	r := o.rng
	ep, port := &s.Endpoints[0], &s.Ports[0]
	pick(r,
		func() { ep.Addresses = []string{o.oddAddress()} },
		func() { ep.Addresses = nil },
		func() { ep.Addresses = append(ep.Addresses, "10.244.0.77") },
		func() { ep.NodeName = nil },
		func() { ep.Conditions = discovery.EndpointConditions{} },
		func() { s.Endpoints = append(s.Endpoints, s.Endpoints...) },
		func() { port.Port = nil },
		func() { n := pick[int32](r, 0, -1, 65536); port.Port = &n },
		func() { port.Name = nil },
		func() { port.Protocol = nil },
		func() { p := pick[v1.Protocol](r, "", "x"); port.Protocol = &p },
		func() { s.Ports = nil },
		func() { s.AddressType = pick[discovery.AddressType](r, "FQDN", "", "ipv4") },
		func() { s.Labels = nil },
		func() { s.Labels = map[string]string{discovery.LabelServiceName: ""} },
		func() { s.Labels = map[string]string{discovery.LabelServiceName: pick(r, "svc-0", "svc-1")} },
	)()
}

// oddAddress returns an address that no frontend or endpoint should have.
func (o *objects) oddAddress() string {
	return pick(o.rng, "127.0.0.1", "::1", "169.254.169.254", "fe80::1", "fe80::1%eth0", "224.0.0.1", "255.255.255.255", "0.0.0.0", "::",
		"10.96.0.1", "fd00:96::1", nodeAddr4, otherAddr4, nodeAddr6, "::ffff:10.244.0.9", "010.244.000.007", "64:ff9b::10.1.2.3", "junk", "")
}
