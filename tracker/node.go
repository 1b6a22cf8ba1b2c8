package tracker

import (
	"net/netip"
	"slices"
)

// NodeInfo is what the choice of endpoints and the node's own frontends depend
// on. It is a plain value; its slice must not be changed after it was handed in.
type NodeInfo struct {
	// Name is the Node's name, as in an endpoint's nodeName. "" makes no endpoint
	// local.
	Name string
	// Zone is the Node's topology.kubernetes.io/zone label, or "" for none.
	Zone string
	// Addresses is the node's own addresses as its Node object gives them
	// (InternalIP first, at most one or two a family in practice). They are what
	// "primary" NodePort addresses stand for, and decide whether the node itself
	// is within a load balancer's source ranges.
	Addresses []netip.Addr
}

// Equal reports whether n and o say the same.
func (n NodeInfo) Equal(o NodeInfo) bool {
	return n.Name == o.Name && n.Zone == o.Zone && slices.Equal(n.Addresses, o.Addresses)
}
