package winkernel

import (
	"fmt"
	"hash/fnv"
	"net/netip"
	"slices"
	"strings"

	"k8s.io/api/core/v1"

	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/tracker"
)

// wanted is a load balancer that a Service needs. Its endpoints are addresses, because the
// service's IDs are not part of a plan.
type wanted struct {
	// settings has no Endpoints and no ID.
	settings LoadBalancer
	// pool holds the endpoints, all with the port settings.InternalPort. It is empty if root
	// is set.
	pool []*tracker.Endpoint
	// root means that the only endpoint is the root endpoint.
	root bool
}

// planner turns compiled Services into load balancers. It is pure.
type planner struct {
	config  *Config
	network *Network
}

// plan returns the load balancers of a Service, at most one for each Frontend.
func (p planner) plan(s *ruleset.Port) []wanted {
	out := make([]wanted, 0, len(s.Frontends))
	source := p.sourceVIP(s)
	for i := range s.Frontends {
		f := &s.Frontends[i]
		pool := p.pool(s, f)
		if len(pool) == 0 {
			continue // the service cannot reject
		}
		w := wanted{settings: LoadBalancer{
			Frontend:       Frontend{f.Addr, f.Port, s.Key.Protocol, s.Key.Family},
			ClientAffinity: s.Spec.Affinity != 0,
			SourceVIP:      source,
		}}
		w.settings.Purpose, w.settings.DSR, w.settings.Flags = p.properties(s, f)
		w.settings.InternalPort, w.pool = onePort(pool)
		out = append(out, w)
	}
	return p.addHealthChecks(out, s)
}

// pool returns the endpoints of new connections to a frontend.
func (p planner) pool(s *ruleset.Port, f *ruleset.Frontend) []*tracker.Endpoint {
	switch {
	case f.Kind == ruleset.KindClusterIP:
		return s.Pool(f.Internal)
	case preserves(s, f):
		return s.Selection.Local
	}
	return s.Pool(f.Target)
}

// preserves reports whether the annotation PreserveDestination applies to a frontend. It means
// that traffic keeps its destination and uses endpoints of this node only.
func preserves(s *ruleset.Port, f *ruleset.Frontend) bool {
	return preserve{}.Equal(s.Spec.Ext) && (f.Kind == ruleset.KindNodePort || isIngress(s, f))
}

// isIngress reports whether a frontend is a load-balancer IP, even if it is an external IP as
// well.
func isIngress(s *ruleset.Port, f *ruleset.Frontend) bool {
	return f.Kind == ruleset.KindLoadBalancerIP || f.Kind == ruleset.KindExternalIP && slices.Contains(s.Spec.LoadBalancerIPs, f.Addr)
}

// properties returns what a frontend's load balancer serves, whether it uses direct server
// return, and its flags.
func (p planner) properties(s *ruleset.Port, f *ruleset.Frontend) (what Purpose, dsr bool, flags PortFlags) {
	switch {
	case f.Kind == ruleset.KindClusterIP:
		return ClusterIP, p.config.DSR, 0
	case f.Kind == ruleset.KindNodePort:
		return NodePort, s.Spec.ExternalLocal, LocalRoutedVIP | VIPExternalIP
	case preserves(s, f):
		return IngressIP, true, VIPExternalIP | UseMux | PreserveDIP
	case isIngress(s, f):
		return IngressIP, s.Spec.ExternalLocal, VIPExternalIP
	}
	return ExternalIP, s.Spec.ExternalLocal, VIPExternalIP
}

// onePort returns the endpoints of a pool that share one port, and that port: a load balancer
// has one port for all endpoints. It chooses the port of most endpoints, and of these the
// lowest, so that a new target port takes over in the middle of a rolling update.
func onePort(pool []*tracker.Endpoint) (uint16, []*tracker.Endpoint) {
	first := pool[0].Addr.Port()
	if !slices.ContainsFunc(pool, func(e *tracker.Endpoint) bool { return e.Addr.Port() != first }) {
		return first, pool
	}
	count := map[uint16]int{}
	for _, e := range pool {
		count[e.Addr.Port()]++
	}
	best := first
	for port, n := range count {
		if n > count[best] || n == count[best] && port < best {
			best = port
		}
	}
	return best, slices.DeleteFunc(slices.Clone(pool), func(e *tracker.Endpoint) bool { return e.Addr.Port() != best })
}

// sourceVIP returns the source address of a Service's connections to remote endpoints. Nodes,
// and endpoints that the network does not know, cannot answer to the configured address.
func (p planner) sourceVIP(s *ruleset.Port) netip.Addr {
	if p.network.Type != Overlay {
		return netip.Addr{}
	}
	for _, e := range s.Selection.Reachable {
		if p.local(e) {
			continue
		}
		_, isNode := p.network.node(e.Addr.Addr())
		if _, known := p.network.provider(e.Addr.Addr()); isNode || !known {
			return p.config.NodeIPs[0]
		}
	}
	return p.config.SourceVIP
}

func (p planner) local(e *tracker.Endpoint) bool { return e.IsLocal(p.config.Node) }

// addHealthChecks adds the load balancers that forward health checks of load-balancer IPs to
// the node, unless a frontend of the Service has the port.
func (p planner) addHealthChecks(out []wanted, s *ruleset.Port) []wanted {
	if !p.config.ForwardHealthCheckVIP {
		return out
	}
	port := s.Spec.HealthCheckNodePort
	if port == 0 {
		port = p.config.HealthzPort
	}
	for i := range s.Frontends {
		f := &s.Frontends[i]
		if port == 0 || !isIngress(s, f) {
			continue
		}
		w := wanted{root: true, settings: LoadBalancer{
			Frontend:     Frontend{f.Addr, port, v1.ProtocolTCP, s.Key.Family},
			InternalPort: port, Purpose: HealthCheck,
		}}
		if slices.ContainsFunc(out, func(o wanted) bool { return o.settings.Frontend == w.settings.Frontend }) {
			continue
		}
		if p.network.Type == Overlay {
			w.settings.SourceVIP = p.config.SourceVIP
		}
		if (preserve{}).Equal(s.Spec.Ext) {
			w.settings.Flags = UseMux | PreserveDIP
		}
		out = append(out, w)
	}
	return out
}

// remoteEndpoint returns the endpoint to make for a pod of another node. The caller chooses
// the MAC.
func (p planner) remoteEndpoint(a netip.Addr) Endpoint {
	e := Endpoint{Network: p.network.ID, Addrs: []netip.Addr{a}, Remote: true}
	if p.network.Type == Overlay {
		var ok bool
		if e.Provider, ok = p.network.provider(a); !ok {
			e.Provider = p.config.NodeIPs[0]
		}
	}
	return e
}

// vipEndpoint returns the endpoint of a cluster IP, which an overlay needs.
func (p planner) vipEndpoint(a netip.Addr) Endpoint {
	return Endpoint{Network: p.network.ID, Addrs: []netip.Addr{a}, Remote: true, MAC: p.config.HostMAC, Provider: p.config.NodeIPs[0]}
}

// sourceEndpoint returns the endpoint of the source VIP, which an overlay needs.
func (p planner) sourceEndpoint() Endpoint {
	return Endpoint{Network: p.network.ID, Addrs: []netip.Addr{p.config.SourceVIP}, MAC: p.config.HostMAC}
}

// owns reports whether a Backend, or kube-proxy, made e and Cleanup deletes it.
func (p planner) owns(e *Endpoint) bool { return p.isRemotePod(e) || p.isVIP(e) }

// isRemotePod reports whether e is an endpoint that a Backend made for a pod of another node.
func (p planner) isRemotePod(e *Endpoint) bool {
	return e.Remote && e.Network == p.network.ID && len(e.Addrs) == 1 && hasRemoteMAC(e.MAC)
}

// isVIP reports whether e is an endpoint that a Backend made for a cluster IP.
func (p planner) isVIP(e *Endpoint) bool {
	return p.network.Type == Overlay && e.Remote && e.Network == p.network.ID && len(e.Addrs) == 1 &&
		e.MAC == p.config.HostMAC && e.Provider == p.config.NodeIPs[0]
}

// remoteMACPrefix begins the hardware addresses of the endpoints for pods of other nodes, as
// kube-proxy's do.
const remoteMACPrefix = "02-11-"

// remoteMAC returns the hardware address for the pod with the address a: the prefix and the
// IPv4 address, as kube-proxy and the network plugins of other nodes compute it. For IPv6 it
// is the prefix and a hash, plus try, which distinguishes addresses with equal hashes.
func remoteMAC(a netip.Addr, try uint32) string {
	b := a.As16()
	n := uint32(b[12])<<24 | uint32(b[13])<<16 | uint32(b[14])<<8 | uint32(b[15])
	if a.Is6() {
		h := fnv.New32a()
		h.Write(b[:])
		n = h.Sum32() + try
	}
	return fmt.Sprintf("%s%02x-%02x-%02x-%02x", remoteMACPrefix, byte(n>>24), byte(n>>16), byte(n>>8), byte(n))
}

// hasRemoteMAC reports whether a normalized hardware address has the prefix.
func hasRemoteMAC(mac string) bool { return strings.HasPrefix(mac, remoteMACPrefix) }

// normalizeMAC returns a hardware address in lower case with "-" between the bytes.
func normalizeMAC(mac string) string { return strings.ReplaceAll(strings.ToLower(mac), ":", "-") }
