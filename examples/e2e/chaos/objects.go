//go:build linux

package main

import (
	"fmt"
	"math/rand/v2"
	"net/netip"

	v1 "k8s.io/api/core/v1"
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

// numbered returns a function that adds a number to the address before the first one of a range.
func numbered(before ...string) func(tracker.Family, int) netip.Addr {
	return func(f tracker.Family, n int) netip.Addr {
		if f == tracker.IPv4 {
			return number(before[0], n)
		}
		return number(before[1], n)
	}
}

// kubernetesIP is the cluster IP of the API server's own Service.
const kubernetesIP = "10.96.100.200"

func newObjects(seed uint64, n int, s *apiServer) *objects {
	var backends []worldgen.Backend
	for i := range pods {
		backends = append(backends, worldgen.Backend{
			Node: fmt.Sprintf("n%d", 1+i/localPods), Ports: podPorts,
			Addr: func(f tracker.Family) netip.Addr { return podAddr(i, map[tracker.Family]int{tracker.IPv6: 1}[f]) },
		})
	}
	return &objects{
		rng: rand.New(rand.NewPCG(seed, 0x6f626a)), server: s,
		gen: worldgen.New(seed, worldgen.Params{
			Families: []tracker.Family{tracker.IPv4, tracker.IPv6},
			Node:     tracker.NodeInfo{Name: nodeName},
			Backends: backends, Services: n, Affinity: true,
			ClusterIP:      numbered("10.96.0.0", "fd00:96::"),
			ExternalIP:     numbered("198.51.100.0", "2001:db8:e::"),
			LoadBalancerIP: numbered("203.0.113.0", "2001:db8:1b::"),
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
		o.server.set(serviceCIDRs, o.serviceCIDR())
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
	n := &v1.Node{ObjectMeta: metav1.ObjectMeta{Name: nodeName, Labels: map[string]string{}}}
	if zone != "" {
		n.Labels[v1.LabelTopologyZone] = zone
	}
	n.Spec.PodCIDRs = []string{"10.244.0.0/24"}
	if o.rng.IntN(10) == 0 || o.addresses == nil {
		o.addresses = []v1.NodeAddress{{Type: v1.NodeHostName, Address: nodeName}}
		add := func(kind v1.NodeAddressType, a string) {
			o.addresses = append(o.addresses, v1.NodeAddress{Type: kind, Address: a})
		}
		if o.rng.IntN(20) != 0 {
			add(v1.NodeInternalIP, pick(o.rng, nodeAddr4, nodeAddr4, otherAddr4))
			if o.rng.IntN(4) != 0 {
				add(v1.NodeInternalIP, pick(o.rng, nodeAddr6, otherAddr6))
			}
			if o.rng.IntN(3) == 0 {
				add(v1.NodeExternalIP, "192.0.2.99")
			}
		}
	}
	n.Status.Addresses = o.addresses
	o.server.set(nodes, n)
}

func (o *objects) serviceCIDR() *networking.ServiceCIDR {
	return &networking.ServiceCIDR{
		ObjectMeta: metav1.ObjectMeta{Name: pick(o.rng, "k", "l")},
		Spec: networking.ServiceCIDRSpec{CIDRs: pick(o.rng,
			[]string{"10.96.0.0/16"}, []string{"10.96.0.0/16", "fd00:96::/112"}, []string{"10.97.0.0/16"}, []string{"10.96.0.0/24"})},
	}
}

// pick chooses one of the values.
func pick[T any](r *rand.Rand, values ...T) T { return values[r.IntN(len(values))] }
