package tracker

import (
	"net/netip"
	"slices"

	v1 "k8s.io/api/core/v1"
)

// NodeInfo is what the choice of endpoints and the node's own frontends depend
// on. It is a plain value; its slice must not be changed after it was handed in.
type NodeInfo struct {
	// Name is the Node's name, as in an endpoint's nodeName. "" makes no endpoint
	// local. Given to [Tracker.SetNode], "" stands for the name that the tracker has.
	Name string
	// Zone is the Node's topology.kubernetes.io/zone label, or "" for none.
	Zone string
	// Addresses is the node's own addresses as its Node object gives them
	// (InternalIP first, at most one or two a family in practice). They are what
	// "primary" NodePort addresses stand for, and decide whether the node itself
	// is within a load balancer's source ranges.
	Addresses []netip.Addr
}

// NodeInfoOf returns what a Node object says: its name, its
// topology.kubernetes.io/zone label, and its address in each family, which is the
// first InternalIP of status.addresses, or else the first ExternalIP, in that
// order. What is not an address is left out. For nil, which stands for a Node that
// was deleted or not seen yet, it returns the zero value, and [Tracker.SetNode]
// ignores that value.
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

// Equal reports whether n and o say the same.
func (n NodeInfo) Equal(o NodeInfo) bool {
	return n.Name == o.Name && n.Zone == o.Zone && slices.Equal(n.Addresses, o.Addresses)
}
