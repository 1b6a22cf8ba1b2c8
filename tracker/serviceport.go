package tracker

import (
	"net/netip"
	"slices"
	"strconv"
	"time"
)

// ServicePort describes one port of one Service in one address family. The trackers
// make ServicePorts; tests and hooks may make their own. A published ServicePort
// never changes: callers may keep it and read it from any goroutine, and must not
// modify it.
type ServicePort struct {
	// Key identifies the port. All addresses below are of Key.Family.
	Key Key

	// Created is the Service's metadata.creationTimestamp in seconds since 1970 UTC,
	// or 0 if it is not set. Package ruleset uses it to decide which Service keeps an
	// address and port that several ask for.
	Created int64

	// ClusterIP is always valid: a Service without a cluster IP in a family has no
	// ServicePort in that family.
	ClusterIP netip.Addr
	// Port is the port on ClusterIP, ExternalIPs and LoadBalancerIPs. It is never 0.
	Port uint16
	// NodePort is the port on the node's own addresses, or 0 for none.
	NodePort uint16
	// HealthCheckNodePort is the port on which load balancers check whether this node
	// has local endpoints (spec.healthCheckNodePort), or 0 for none.
	HealthCheckNodePort uint16

	// ExternalIPs holds the spec.externalIPs of the family, without duplicates, in
	// the Service's order.
	ExternalIPs []netip.Addr
	// LoadBalancerIPs holds the status.loadBalancer.ingress addresses whose packets
	// arrive with that destination: entries with ipMode unset or VIP (KEP-1860).
	LoadBalancerIPs []netip.Addr
	// SourceRanges holds the spec.loadBalancerSourceRanges of the family, masked. It
	// restricts LoadBalancerIPs only. Empty means that every source is allowed.
	SourceRanges []netip.Prefix

	// Affinity is the time for which a client keeps its endpoint after its last new
	// connection (sessionAffinity ClientIP), or 0 for no affinity.
	Affinity time.Duration
	// InternalLocal means internalTrafficPolicy Local: ClusterIP traffic uses only
	// endpoints on the client's node.
	InternalLocal bool
	// ExternalLocal means externalTrafficPolicy Local: external traffic to NodePort,
	// ExternalIPs and LoadBalancerIPs uses only endpoints on this node and keeps its
	// source address.
	ExternalLocal bool
	// NeedLocalSet makes [Select] compute [Selection].Local even if no traffic policy
	// needs it. Only hooks set it, for example for direct server return.
	NeedLocalSet bool

	// Hash selects the part of a connection that determines its endpoint; by default
	// endpoints are chosen at random. Only hooks set it. Unknown values count as
	// HashNone.
	Hash Hash
	// HashBuckets is the minimum number of buckets in the hash table, up to 65,521. It
	// applies only if Hash is set. 0 chooses by the number of endpoints: 509 buckets
	// for up to 15 endpoints, 4,093 for up to 150, 16,381 for up to 650, and 65,521
	// above. A table of another size sends most connections to other endpoints; set
	// HashBuckets to keep the size when the number of endpoints crosses one of these
	// limits. With 100 buckets per endpoint, the shares are even to about one per
	// cent.
	HashBuckets uint16

	// Ext is the caller's own data, set by [Config.OnService], or nil.
	Ext Extension
}

// ExternallyAccessible reports whether the port has an address other than its cluster
// IP.
func (p *ServicePort) ExternallyAccessible() bool {
	return p.NodePort != 0 || len(p.LoadBalancerIPs) != 0 || len(p.ExternalIPs) != 0
}

// UsesClusterEndpoints reports whether some traffic to the port may use endpoints on
// all nodes. With externalTrafficPolicy Local this holds for traffic to an external
// address from a pod or from the node itself.
func (p *ServicePort) UsesClusterEndpoints() bool {
	return !p.InternalLocal || p.ExternallyAccessible()
}

// UsesLocalEndpoints reports whether some traffic to the port may use only endpoints
// on this node.
func (p *ServicePort) UsesLocalEndpoints() bool {
	return p.InternalLocal || p.NeedLocalSet || p.ExternalLocal && p.ExternallyAccessible()
}

// Equal reports whether all fields of p and o are equal. Either may be nil.
func (p *ServicePort) Equal(o *ServicePort) bool {
	if p == nil || o == nil {
		return p == o
	}
	return p == o || p.Key == o.Key &&
		p.Created == o.Created &&
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
		p.HashBuckets == o.HashBuckets &&
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
