package ruleset

import (
	"net/netip"
	"strings"

	"github.com/go-proxier/proxier/tracker"
)

// Node holds the settings of the node as a whole. A backend gets it with every
// [Delta]. A published Node never changes.
type Node struct {
	// Info is the tracker's information about the node.
	Info tracker.NodeInfo
	// NodePorts4 and NodePorts6 are the node's addresses that serve NodePorts.
	NodePorts4, NodePorts6 NodePorts
	// ServiceCIDRs holds the ranges of cluster IPs, masked. Packets to an address in
	// them that no Service has are dropped. Empty means unknown.
	ServiceCIDRs []netip.Prefix
	// LocalTraffic distinguishes pod traffic from other traffic.
	LocalTraffic LocalTraffic
	// MasqueradeAll replaces the source address of all traffic to cluster IPs.
	MasqueradeAll bool
	// HashSeed is the seed for choosing endpoints by hash (see [Port.Hash]). 0 is
	// as good as any other value.
	HashSeed uint64
}

// NodePorts returns the family's NodePort addresses.
func (n *Node) NodePorts(f tracker.Family) NodePorts {
	if f == tracker.IPv6 {
		return n.NodePorts6
	}
	return n.NodePorts4
}

// NodePorts is the set of the node's own addresses of one family that serve
// NodePorts. The zero value is empty.
type NodePorts struct {
	// All means every address of the node except loopback addresses.
	All bool
	// Prefixes, if All is false, means every address of the node in one of these
	// prefixes except loopback addresses.
	Prefixes []netip.Prefix
	// Loopback means, whatever All is, the loopback addresses in these prefixes. Data
	// planes in the kernel may ignore it: packets from loopback addresses cannot leave
	// the node, so a data plane in userspace usually serves them.
	Loopback []netip.Prefix
}

// LocalTraffic distinguishes packets of this node's pods from others. At most one of
// its fields is set. The zero value recognizes no traffic as local; use it if the
// cluster's pod ranges are unknown.
type LocalTraffic struct {
	// CIDRs means packets from an address in one of these ranges. In a family without
	// ranges no traffic is recognized as local.
	CIDRs []netip.Prefix
	// Bridge means packets that arrive on the interface with this name.
	Bridge string
	// InterfacePrefix means packets that arrive on an interface whose name has this
	// prefix.
	InterfacePrefix string
}

// Detects reports whether l can distinguish pod traffic of the family from other
// traffic.
func (l LocalTraffic) Detects(f tracker.Family) bool {
	if l.Bridge != "" || l.InterfacePrefix != "" {
		return true
	}
	for _, c := range l.CIDRs {
		if tracker.FamilyOf(c.Addr()) == f {
			return true
		}
	}
	return false
}

// Recognizes reports whether l recognizes a packet as coming from one of this node's
// pods. from is its source address, and in the name of the interface on which it
// arrived, or "" if the node itself sent it. With CIDRs the source address counts
// even if the node itself sent the packet, because replies to a pod address pass
// through the node in any case.
func (l LocalTraffic) Recognizes(from netip.Addr, in string) bool {
	switch {
	case l.Bridge != "":
		return in == l.Bridge
	case l.InterfacePrefix != "":
		return strings.HasPrefix(in, l.InterfacePrefix)
	}
	return containsAddr(l.CIDRs, canonical(from))
}
