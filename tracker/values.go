package tracker

import (
	"cmp"
	"net/netip"
	"slices"
	"strings"

	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/go-proxier/proxier/internal/complaint"
)

// ServicePortName names one port of one Service. It is comparable.
type ServicePortName struct {
	types.NamespacedName
	// Port is the port's name. It is "" for the only port of a Service, if unnamed.
	Port string
	// Protocol is part of the name: a Service may use the same port name and number
	// for TCP and UDP.
	Protocol v1.Protocol
}

// String returns "namespace/name" or "namespace/name:port", in one printable line, with Go's escape sequences where a
// name has what Kubernetes does not allow. As in kube-proxy it omits the protocol, so the text is not unique.
func (n ServicePortName) String() string {
	s := n.NamespacedName.String()
	if n.Port != "" {
		s += ":" + n.Port
	}
	return complaint.Printable(s)
}

// Compare orders names by namespace, name, port name and protocol.
func (n ServicePortName) Compare(o ServicePortName) int {
	return cmp.Or(
		strings.Compare(n.Namespace, o.Namespace),
		strings.Compare(n.Name, o.Name),
		strings.Compare(n.Port, o.Port),
		strings.Compare(string(n.Protocol), string(o.Protocol)),
	)
}

// Key names one port of one Service in one address family. A dual-stack Service has
// two keys for each port. It is comparable.
type Key struct {
	ServicePortName
	// Family is IPv4 or IPv6.
	Family Family
}

// String returns "namespace/name:port/PROTOCOL/IPv4", which is unique for the key.
func (k Key) String() string {
	return k.ServicePortName.String() + "/" + complaint.Printable(string(k.Protocol)) + "/" + k.Family.String()
}

// Compare orders keys as [ServicePortName.Compare] does, then by family.
func (k Key) Compare(o Key) int {
	return cmp.Or(k.ServicePortName.Compare(o.ServicePortName), cmp.Compare(k.Family, o.Family))
}

// Family is an IP address family. The zero value is not a family and never occurs in
// a published value.
type Family uint8

// The address families, numbered as IP's version field (RFC 791, RFC 8200).
const (
	IPv4 Family = 4
	IPv6 Family = 6
)

// FamilyOf returns the family of a, or 0 for the zero Addr. An IPv4-mapped IPv6
// address counts as IPv4.
func FamilyOf(a netip.Addr) Family {
	switch {
	case a.Is4(), a.Is4In6():
		return IPv4
	case a.Is6():
		return IPv6
	}
	return 0
}

// String returns "IPv4" or "IPv6", as [k8s.io/api/core/v1.IPFamily] spells them,
// and "none" for anything else.
func (f Family) String() string {
	switch f {
	case IPv4:
		return "IPv4"
	case IPv6:
		return "IPv6"
	}
	return "none"
}

// Bits returns the length of the family's addresses in bits: 32, 128, or 0 if f is
// not a family.
func (f Family) Bits() int {
	switch f {
	case IPv4:
		return 32
	case IPv6:
		return 128
	}
	return 0
}

// Endpoint is one address and port of a Service port. The trackers make Endpoints; tests and hooks may make their
// own. A published Endpoint never changes: callers may keep it and read it from any goroutine, and must not modify
// it. An endpoint that an update does not change keeps its pointer, so callers can compare pointers before they call
// [Endpoint.Equal].
type Endpoint struct {
	// Addr is the port, and the first of the endpoint's addresses in the EndpointSlice.
	Addr netip.AddrPort
	// Node is the name of the endpoint's node, or "" if unknown.
	Node string
	// Zone is the endpoint's zone, or "" if unknown.
	Zone string
	// ForNodes and ForZones are the hints: the nodes and zones whose traffic this endpoint should serve (KEP-3015,
	// KEP-2433). Nil means no hint. Endpoints share these slices.
	ForNodes, ForZones []string
	// Ready, Serving and Terminating are the EndpointSlice's conditions. Unset
	// conditions have the API's defaults: true, true and false.
	Ready, Serving, Terminating bool
	// Weight is the endpoint's share of new connections relative to the other
	// endpoints. It is 1 unless a hook changes it. An endpoint of weight 0 gets no
	// new connections and keeps its existing ones.
	Weight uint16
	// Ext is the caller's own data, set by [Config.OnEndpoint] or
	// [Config.OnServiceEndpoint], or nil.
	Ext Extension
}

// IsLocal reports whether the endpoint is known to run on the named node.
func (e *Endpoint) IsLocal(node string) bool { return node != "" && e.Node == node }

// Equal reports whether all fields of e and o are equal. Either may be nil.
func (e *Endpoint) Equal(o *Endpoint) bool {
	if e == nil || o == nil {
		return e == o
	}
	return e == o || e.Addr == o.Addr &&
		e.Ready == o.Ready && e.Serving == o.Serving && e.Terminating == o.Terminating &&
		e.Weight == o.Weight &&
		e.Node == o.Node && e.Zone == o.Zone &&
		slices.Equal(e.ForNodes, o.ForNodes) && slices.Equal(e.ForZones, o.ForZones) &&
		equalExt(e.Ext, o.Ext)
}

// String returns "address:port", with an IPv6 address in brackets.
func (e *Endpoint) String() string { return e.Addr.String() }

// NodeInfo holds the facts about the node that endpoint selection and the node's own frontends depend on. Addresses
// must not be modified after the NodeInfo is passed on.
type NodeInfo struct {
	// Name is the Node's name, as in the nodeName of an endpoint. With "" no endpoint is local. [Tracker.SetNode]
	// replaces "" with the name that the tracker already has.
	Name string
	// Zone is the Node's topology.kubernetes.io/zone label, or "" for none.
	Zone string
	// Addresses holds the node's own addresses from its Node object, usually one or two per family, InternalIP first:
	// the "primary" NodePort addresses. They also decide whether the node itself is within a load balancer's source
	// ranges.
	Addresses []netip.Addr
}

// NodeInfoOf returns the name of a Node, its topology.kubernetes.io/zone label, and its address in each family: the
// first InternalIP of status.addresses, or else the first ExternalIP. It skips entries that are not IP addresses. For
// nil, a Node that was deleted or not seen yet, it returns the zero value.
func NodeInfoOf(n *v1.Node) NodeInfo {
	if n == nil {
		return NodeInfo{}
	}
	info := NodeInfo{Name: n.Name, Zone: n.Labels[v1.LabelTopologyZone]}
	for _, kind := range []v1.NodeAddressType{v1.NodeInternalIP, v1.NodeExternalIP} {
		for _, a := range n.Status.Addresses {
			ip, err := netip.ParseAddr(a.Address)
			if a.Type != kind || err != nil || ip.Zone() != "" {
				continue
			}
			if !slices.ContainsFunc(info.Addresses, func(o netip.Addr) bool { return FamilyOf(o) == FamilyOf(ip) }) {
				info.Addresses = append(info.Addresses, ip.Unmap())
			}
		}
	}
	return info
}

// Equal reports whether all fields of n and o are equal.
func (n NodeInfo) Equal(o NodeInfo) bool {
	return n.Name == o.Name && n.Zone == o.Zone && slices.Equal(n.Addresses, o.Addresses)
}
