package backendtest

import (
	"fmt"
	"math/rand/v2"
	"net/netip"
	"slices"

	v1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/go-proxier/proxier/internal/testing/worldgen"
	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/tracker"
)

// Numbered returns dual-stack Service number i with the edits made.
func Numbered(i int, edits ...func(*v1.Service)) *v1.Service {
	v4, v6 := fmt.Sprintf("10.96.0.%d", i+1), fmt.Sprintf("fd00:10:96::%x", i+1)
	return Service(ServiceName(i), "p", v4, v6, edits...)
}

// NumberedSlice returns the EndpointSlice in family f of Service number i, with endpoints
// numbered eps, every other one on this node.
func NumberedSlice(i int, f tracker.Family, eps ...int) *discovery.EndpointSlice {
	s := Slice(ServiceName(i), f.String(), f, "p", v1.ProtocolTCP)
	for _, e := range eps {
		addr := fmt.Sprintf("10.244.%d.%d", e>>8, e&255)
		if f == tracker.IPv6 {
			addr = fmt.Sprintf("fd00:10:244::%x", e)
		}
		s.Endpoints = append(s.Endpoints, Endpoint(addr, [...]string{ThisNode, "node-b"}[e%2]))
	}
	return s
}

// Changes is the kind of random changes that [Changes.Make] makes.
type Changes struct {
	// Hash adds weights of endpoints and Services that ask for a hash.
	Hash bool
	// Shared is the number of external IPs that the Services share, 0 for none.
	Shared int
}

// Make changes one of eight numbered Services, its endpoints or the node.
func (c Changes) Make(tr *tracker.Tracker, e *ruleset.Engine, rng *rand.Rand) {
	i := rng.IntN(8)
	f := []tracker.Family{tracker.IPv4, tracker.IPv6}[rng.IntN(2)]
	name := ServiceName(i)
	switch rng.IntN(8) {
	case 0:
		tr.DeleteService(name)
	case 1:
		tr.DeleteSlice(types.NamespacedName{Namespace: "ns", Name: fmt.Sprintf("svc-%d-%s", i, f)})
	case 2, 3, 4:
		var eps []int
		for range []int{0, 1, 2, 3, 5, 17, 18, 40}[rng.IntN(8)] {
			if ep := 1 + rng.IntN(60); !slices.Contains(eps, ep) {
				eps = append(eps, ep)
			}
		}
		es := NumberedSlice(i, f, eps...)
		if rng.IntN(3) == 0 && c.Hash {
			most := []int{2, 5, 65535}[rng.IntN(3)]
			for _, ep := range es.Endpoints {
				worldgen.SetWeight(es, ep.Addresses[0], rng.IntN(most+1))
			}
		}
		tr.SetSlice(es)
	case 5:
		if rng.IntN(3) == 0 {
			e.SetServiceCIDRs([]netip.Prefix{netip.PrefixFrom(netip.MustParseAddr("10.96.0.0"), 8+rng.IntN(20))}, nil)
			break
		}
		tr.SetNode(tracker.NodeInfo{Name: ThisNode, Zone: "z1", Addresses: []netip.Addr{netip.AddrFrom4([4]byte{192, 168, 7, byte(rng.IntN(4))})}})
	default:
		tr.SetService(Numbered(i, func(s *v1.Service) {
			s.Spec.Type = []v1.ServiceType{v1.ServiceTypeClusterIP, v1.ServiceTypeNodePort, v1.ServiceTypeLoadBalancer}[rng.IntN(3)]
			if rng.IntN(2) == 0 {
				s.Spec.Ports[0].NodePort = int32(30000 + i)
			}
			if rng.IntN(3) == 0 {
				s.Spec.Ports = append(s.Spec.Ports, v1.ServicePort{Name: "q", Port: 53, Protocol: v1.ProtocolUDP})
			}
			if rng.IntN(3) == 0 {
				n := i
				if c.Shared != 0 {
					n = rng.IntN(c.Shared)
				}
				s.Spec.ExternalIPs = []string{fmt.Sprintf("198.51.100.%d", n), fmt.Sprintf("2001:db8::%x", n)}
			}
			if s.Spec.Type == v1.ServiceTypeLoadBalancer {
				s.Status.LoadBalancer.Ingress = []v1.LoadBalancerIngress{{IP: fmt.Sprintf("203.0.113.%d", i)}, {IP: fmt.Sprintf("2001:db8:1::%x", i)}}
				if rng.IntN(2) == 0 {
					s.Spec.LoadBalancerSourceRanges = []string{"192.168.7.0/24", fmt.Sprintf("172.16.0.0/%d", 12+rng.IntN(4)), "2001:db8:2::/48"}[rng.IntN(3):]
				}
			}
			if rng.IntN(3) == 0 {
				Affinity(int32(10 + rng.IntN(3)))(s)
			}
			if c.Hash {
				worldgen.SetHash(s, [...]tracker.Hash{0, 0, 0, tracker.HashSource, tracker.HashSourcePort}[rng.IntN(5)])
			}
			if rng.IntN(3) == 0 {
				ExternalLocal(s)
			}
			if rng.IntN(5) == 0 {
				InternalLocal(s)
			}
		}))
	}
}
