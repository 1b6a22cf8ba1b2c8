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

	// Created is the Service's metadata.creationTimestamp in UTC, which has whole seconds, or
	// the zero Time if it is not set. Package ruleset uses it to decide which Service keeps an
	// address and port that several ask for.
	Created time.Time

	// ClusterIP is always valid: a Service without a cluster IP in a family has no
	// ServicePort in that family. If spec.ipFamilies is empty, which the API server never
	// leaves it, the Service has spec.clusterIP alone.
	ClusterIP netip.Addr
	// Port is the port on ClusterIP, ExternalIPs and LoadBalancerIPs. It is never 0.
	Port uint16
	// NodePort is the port on the node's own addresses, or 0 for none.
	NodePort uint16
	// HealthCheckNodePort is the port on which load balancers check whether this node
	// has local endpoints (spec.healthCheckNodePort), or 0 for none.
	HealthCheckNodePort uint16

	// ExternalIPs holds the spec.externalIPs of the family, without duplicates, in the Service's order.
	// It has no unspecified, multicast, broadcast, loopback or link-local address.
	ExternalIPs []netip.Addr
	// LoadBalancerIPs holds the status.loadBalancer.ingress addresses whose packets arrive with that
	// destination: entries with ipMode unset or VIP (KEP-1860). It has no unspecified, multicast,
	// broadcast or loopback address, and not 169.254.169.254.
	LoadBalancerIPs []netip.Addr
	// SourceRanges holds the spec.loadBalancerSourceRanges of the family, masked. It restricts
	// LoadBalancerIPs only. Empty means that every source is allowed. If some ranges are invalid and
	// none is left, it has a range that admits no source.
	SourceRanges []netip.Prefix
	// SourceRangesLeftOut is the number of ranges of both families that are missing from
	// SourceRanges because the Service has too many: see [ReasonLimitExceeded].
	SourceRangesLeftOut int

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
	// PreferLocal makes traffic to NodePort, ExternalIPs and LoadBalancerIPs use the
	// ready endpoints on this node while it has any, and otherwise those that it would
	// use without PreferLocal. The source address is replaced in both cases. It has no
	// effect with ExternalLocal. Only hooks set it: the API has no field for it
	// (KEP-3015 leaves external traffic out).
	PreferLocal bool
	// NeedLocalSet makes [Select] compute [Selection].Local even if no traffic policy
	// needs it. Only hooks set it, for example for direct server return.
	NeedLocalSet bool

	// Hash selects the part of a connection that determines its endpoint; by default
	// endpoints are chosen at random. Only hooks set it. Unknown values count as
	// HashNone.
	Hash Hash
	// HashBuckets is the number of buckets that the hash table is to have. It applies only if
	// Hash is set. The table has the next of 251, 509, 1,021, 2,039 and 4,093 buckets, and more only
	// if there are more endpoints than that: ruleset.MaxBuckets. 0 chooses by the number of
	// endpoints: 509 buckets for up to 15 endpoints, and 4,093 above. A table of another size sends
	// most connections to other endpoints; set HashBuckets to keep the size when the number of
	// endpoints crosses 15. With 100 buckets per endpoint, the shares are even to about one per
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
// on this node, or prefers them.
func (p *ServicePort) UsesLocalEndpoints() bool {
	return p.InternalLocal || p.NeedLocalSet || (p.ExternalLocal || p.PreferLocal) && p.ExternallyAccessible()
}

// Equal reports whether all fields of p and o are equal. Either may be nil.
func (p *ServicePort) Equal(o *ServicePort) bool {
	if p == nil || o == nil {
		return p == o
	}
	return p == o || p.Key == o.Key &&
		p.Created.Equal(o.Created) &&
		p.ClusterIP == o.ClusterIP &&
		p.Port == o.Port &&
		p.NodePort == o.NodePort &&
		p.HealthCheckNodePort == o.HealthCheckNodePort &&
		slices.Equal(p.ExternalIPs, o.ExternalIPs) &&
		slices.Equal(p.LoadBalancerIPs, o.LoadBalancerIPs) &&
		slices.Equal(p.SourceRanges, o.SourceRanges) && p.SourceRangesLeftOut == o.SourceRangesLeftOut &&
		p.Affinity == o.Affinity &&
		p.InternalLocal == o.InternalLocal &&
		p.ExternalLocal == o.ExternalLocal &&
		p.PreferLocal == o.PreferLocal &&
		p.NeedLocalSet == o.NeedLocalSet &&
		p.Hash == o.Hash &&
		p.HashBuckets == o.HashBuckets &&
		equalExt(p.Ext, o.Ext)
}

// CompareAge compares the creation times of two Services. It returns a negative number if p's is
// older, 0 if both have the same age, and a positive number if o's is older. A Service of unknown
// age counts as younger than all others.
//
// A data plane that has room for some Services only gives it first to those that have it already,
// then to the oldest, and then in the order of their keys. So no user takes room from another by a
// new object or by its name, and the order of arrival after a restart decides nothing.
func (p *ServicePort) CompareAge(o *ServicePort) int {
	switch {
	case p.Created.IsZero() == o.Created.IsZero():
		return p.Created.Compare(o.Created)
	case p.Created.IsZero():
		return 1
	}
	return -1
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

// Hash selects the part of a new connection that determines its endpoint. Kubernetes
// has no field for it; only hooks set it (see [Config.OnService]).
type Hash uint8

const (
	// HashNone chooses endpoints at random, in proportion to their weights.
	HashNone Hash = iota
	// HashSource hashes the client's address. All connections of a client use one
	// endpoint.
	HashSource
	// HashSourcePort hashes the client's address and port. Nodes with the same
	// endpoints send the packets of a connection to the same endpoint, even if they
	// did not see its first packet.
	HashSourcePort
)

// String returns "none", "source" or "source and port".
func (h Hash) String() string {
	switch h {
	case HashNone:
		return "none"
	case HashSource:
		return "source"
	case HashSourcePort:
		return "source and port"
	}
	return "unknown"
}
