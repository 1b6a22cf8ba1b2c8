package tracker

import (
	"net/netip"
	"slices"

	v1 "k8s.io/api/core/v1"
)

// NodeInfo describes the node: the facts that endpoint selection and the node's own
// frontends depend on. It is a plain value. Addresses must not be modified after the
// NodeInfo is passed on.
type NodeInfo struct {
	// Name is the Node's name, as in the nodeName of an endpoint. With "" no endpoint
	// is local. [Tracker.SetNode] replaces "" with the name that the tracker already
	// has.
	Name string
	// Zone is the Node's topology.kubernetes.io/zone label, or "" for none.
	Zone string
	// Addresses holds the node's own addresses from its Node object, usually one or
	// two per family, InternalIP first. They are the "primary" NodePort addresses.
	// They also decide whether the node itself is within a load balancer's source
	// ranges.
	Addresses []netip.Addr
}

// NodeInfoOf returns the name of a Node, its topology.kubernetes.io/zone label, and
// its address in each family: the first InternalIP of status.addresses, or else the
// first ExternalIP. It skips entries that are not IP addresses. For nil, which means
// that the Node was deleted or not seen yet, it returns the zero value.
// [Tracker.SetNode] ignores the zero value.
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
