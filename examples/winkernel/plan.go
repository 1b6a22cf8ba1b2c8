package winkernel

import (
	"cmp"
	"fmt"
	"hash/fnv"
	"net/netip"
	"slices"
	"strings"

	"k8s.io/api/core/v1"

	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/tracker"
)

// wanted is a load balancer that a Service needs. It has no ID, and Endpoints are not part of a plan.
type wanted struct {
	LoadBalancer
	// pool holds the endpoints, all with the port InternalPort. That of a health check is empty: its endpoint is
	// the root endpoint.
	pool []*tracker.Endpoint
}

// planner turns compiled Services into load balancers. It is pure.
type planner struct {
	config  *Config
	network Network
}

// plan returns the load balancers of a Service, at most one for each Frontend.
func (p *planner) plan(s *ruleset.Port) []wanted {
	out := make([]wanted, 0, len(s.Frontends))
	source := p.sourceVIP(s)
	for i := range s.Frontends {
		f := &s.Frontends[i]
		w := p.balancer(s, f)
		served := len(w.pool) != 0 // the service cannot reject
		if served {
			w.InternalPort, w.pool = onePort(w.pool)
			w.ClientAffinity, w.SourceVIP = s.Spec.Affinity != 0, source
			out = append(out, w)
		}
		if check, ok := p.healthCheck(s, f); ok && !(served && check.Frontend == w.Frontend) {
			out = append(out, check)
		}
	}
	return out
}

// balancer returns the load balancer of a frontend without its port and source address.
func (p *planner) balancer(s *ruleset.Port, f *ruleset.Frontend) wanted {
	w := wanted{pool: s.Pool(f.Target), LoadBalancer: LoadBalancer{
		Frontend: Frontend{f.Addr, f.Port, s.Key.Protocol, s.Key.Family},
		Purpose:  ExternalIP, DSR: s.Spec.ExternalLocal, Flags: VIPExternalIP,
	}}
	switch {
	case f.Kind == ruleset.KindClusterIP:
		w.Purpose, w.DSR, w.Flags, w.pool = ClusterIP, p.config.DSR, 0, s.Pool(f.Internal)
	case f.Kind == ruleset.KindNodePort:
		w.Purpose, w.Flags = NodePort, LocalRoutedVIP|VIPExternalIP
		if preserves(s) {
			w.pool = s.Selection.Local
		}
	case isIngress(s, f):
		w.Purpose = IngressIP
		if preserves(s) {
			w.DSR, w.Flags, w.pool = true, VIPExternalIP|UseMux|PreserveDIP, s.Selection.Local
		}
	}
	return w
}

// preserves reports whether a Service has the annotation PreserveDestination. It means that traffic of node ports
// and load-balancer IPs keeps its destination and uses endpoints of this node only.
func preserves(s *ruleset.Port) bool { return preserve{}.Equal(s.Spec.Ext) }

// isIngress reports whether a frontend is a load-balancer IP, even if it is an external IP as
// well.
func isIngress(s *ruleset.Port, f *ruleset.Frontend) bool {
	return f.Kind == ruleset.KindLoadBalancerIP || f.Kind == ruleset.KindExternalIP && slices.Contains(s.Spec.LoadBalancerIPs, f.Addr)
}

// healthCheck returns the load balancer that forwards health checks of a load-balancer IP to the node.
func (p *planner) healthCheck(s *ruleset.Port, f *ruleset.Frontend) (wanted, bool) {
	port := cmp.Or(s.Spec.HealthCheckNodePort, p.config.HealthzPort)
	w := wanted{LoadBalancer: LoadBalancer{
		Frontend:     Frontend{f.Addr, port, v1.ProtocolTCP, s.Key.Family},
		InternalPort: port, Purpose: HealthCheck,
	}}
	if p.network.Type == Overlay {
		w.SourceVIP = p.config.SourceVIP
	}
	if preserves(s) {
		w.Flags = UseMux | PreserveDIP
	}
	return w, p.config.ForwardHealthCheckVIP && port != 0 && isIngress(s, f)
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
func (p *planner) sourceVIP(s *ruleset.Port) netip.Addr {
	if p.network.Type != Overlay {
		return netip.Addr{}
	}
	for _, e := range s.Selection.Reachable {
		if p.local(e) {
			continue
		}
		if _, known := p.network.provider(e.Addr.Addr()); !known || p.network.isNode(e.Addr.Addr()) {
			return p.config.NodeIPs[0]
		}
	}
	return p.config.SourceVIP
}

// families returns the family of a single-stack node, and 0 for both.
func (p *planner) families() tracker.Family {
	if len(p.config.NodeIPs) == 1 {
		return tracker.FamilyOf(p.config.NodeIPs[0])
	}
	return 0
}

func (p *planner) local(e *tracker.Endpoint) bool { return e.IsLocal(p.config.Node) }

// remoteEndpoint returns the endpoint to make for a pod of another node. The caller chooses
// the MAC.
func (p *planner) remoteEndpoint(a netip.Addr) Endpoint {
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
func (p *planner) vipEndpoint(a netip.Addr) Endpoint {
	return Endpoint{Network: p.network.ID, Addrs: []netip.Addr{a}, Remote: true, MAC: p.config.HostMAC, Provider: p.config.NodeIPs[0]}
}

// sourceEndpoint returns the endpoint of the source VIP, which an overlay needs.
func (p *planner) sourceEndpoint() Endpoint {
	return Endpoint{Network: p.network.ID, Addrs: []netip.Addr{p.config.SourceVIP}, MAC: p.config.HostMAC}
}

// owns reports whether a Backend, or kube-proxy, made e and Cleanup deletes it.
func (p *planner) owns(e *Endpoint) bool { return p.isRemotePod(e) || p.isVIP(e) }

// isRemotePod reports whether e is an endpoint that a Backend made for a pod of another node.
func (p *planner) isRemotePod(e *Endpoint) bool {
	return e.Remote && e.Network == p.network.ID && len(e.Addrs) == 1 && hasRemoteMAC(e.MAC)
}

// isVIP reports whether e is an endpoint that a Backend made for a cluster IP.
func (p *planner) isVIP(e *Endpoint) bool {
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
