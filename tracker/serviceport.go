package tracker

import (
	"net/netip"
	"slices"
	"strconv"
	"time"
)

// ServicePort is what a node agent needs to know of one port of one Service in
// one address family. It is made by the trackers; tests and hooks may make their
// own. Once published it is never changed, so it may be kept and read from any
// goroutine, and must not be written to.
type ServicePort struct {
	// Key says whose port this is. Every address below is of Key.Family.
	Key Key

	// ClusterIP is always valid: a Service without a cluster IP of the family has
	// no ServicePort in it.
	ClusterIP netip.Addr
	// Port is the port at ClusterIP, ExternalIPs and LoadBalancerIPs, never 0.
	Port uint16
	// NodePort is the port at the node's own addresses, or 0 for none.
	NodePort uint16
	// HealthCheckNodePort is the port at which load balancers ask whether this
	// node has local endpoints (spec.healthCheckNodePort), or 0 for none.
	HealthCheckNodePort uint16

	// ExternalIPs is spec.externalIPs, of the family, without duplicates, in the
	// Service's order.
	ExternalIPs []netip.Addr
	// LoadBalancerIPs is those of status.loadBalancer.ingress whose packets arrive
	// with the address as destination: ipMode unset or VIP (KEP-1860).
	LoadBalancerIPs []netip.Addr
	// SourceRanges is spec.loadBalancerSourceRanges of the family, masked. Empty
	// means that every source may use LoadBalancerIPs. It restricts nothing else.
	SourceRanges []netip.Prefix

	// Affinity is how long a client stays with its endpoint after its last new
	// connection (sessionAffinity ClientIP), or 0 for no affinity.
	Affinity time.Duration
	// InternalLocal is internalTrafficPolicy Local: ClusterIP traffic uses only
	// endpoints of its own node.
	InternalLocal bool
	// ExternalLocal is externalTrafficPolicy Local: traffic from outside to
	// NodePort, ExternalIPs and LoadBalancerIPs uses only endpoints of this node
	// and keeps its source address.
	ExternalLocal bool
	// NeedLocalSet asks for [Selection.Local] to be computed though no traffic
	// policy needs it. Only hooks set it, e.g. for direct server return.
	NeedLocalSet bool

	// Hash says from what of a connection its endpoint follows, nothing by default.
	// Only hooks set it; a value that is none of the constants counts as HashNone.
	Hash Hash
	// HashSlots, if Hash is set, is how many slots of a table the endpoints are to
	// share at least, up to 65,521; 0 is as many as suit their number: 509 for up to
	// 15, 4,093 for up to 150, 16,381 for up to 650, and 65,521. It keeps the table's
	// size where the number of endpoints goes past one of these: a table of another
	// size sends most connections to other endpoints. 100 slots for each endpoint
	// have connections spread to one in a hundred.
	HashSlots uint16

	// Ext is the caller's own data, from [Config.OnService], or nil.
	Ext Extension
}

// ExternallyAccessible reports whether the port can be reached other than by its
// cluster IP.
func (p *ServicePort) ExternallyAccessible() bool {
	return p.NodePort != 0 || len(p.LoadBalancerIPs) != 0 || len(p.ExternalIPs) != 0
}

// UsesClusterEndpoints reports whether some traffic to the port may use
// endpoints of every node. With externalTrafficPolicy Local that is so too, for
// traffic to an external address that starts at a pod or at the node itself.
func (p *ServicePort) UsesClusterEndpoints() bool {
	return !p.InternalLocal || p.ExternallyAccessible()
}

// UsesLocalEndpoints reports whether some traffic to the port may use only
// endpoints of this node.
func (p *ServicePort) UsesLocalEndpoints() bool {
	return p.InternalLocal || p.NeedLocalSet || p.ExternalLocal && p.ExternallyAccessible()
}

// Equal reports whether p and o say the same. Either may be nil.
func (p *ServicePort) Equal(o *ServicePort) bool {
	if p == nil || o == nil {
		return p == o
	}
	return p == o || p.Key == o.Key &&
		p.ClusterIP == o.ClusterIP &&
		p.Port == o.Port &&
		p.NodePort == o.NodePort &&
		p.HealthCheckNodePort == o.HealthCheckNodePort &&
		slices.Equal(p.ExternalIPs, o.ExternalIPs) &&
		slices.Equal(p.LoadBalancerIPs, o.LoadBalancerIPs) &&
		slices.Equal(p.SourceRanges, o.SourceRanges) &&
		p.Affinity == o.Affinity &&
		p.InternalLocal == o.InternalLocal &&
		p.ExternalLocal == o.ExternalLocal &&
		p.NeedLocalSet == o.NeedLocalSet &&
		p.Hash == o.Hash &&
		p.HashSlots == o.HashSlots &&
		equalExt(p.Ext, o.Ext)
}

// String returns the cluster address as "IP:port/PROTOCOL", with an IPv6
// address in brackets.
func (p *ServicePort) String() string {
	ip := p.ClusterIP.String()
	if p.ClusterIP.Is6() {
		ip = "[" + ip + "]"
	}
	return ip + ":" + strconv.Itoa(int(p.Port)) + "/" + string(p.Key.Protocol)
}
