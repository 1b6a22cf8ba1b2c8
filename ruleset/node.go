package ruleset

import (
	"net/netip"
	"strings"

	"github.com/go-proxier/proxier/tracker"
)

// Node is what holds for the node as a whole rather than for one Service. A
// backend gets it with every [Delta]; it is never changed once handed out.
type Node struct {
	// Info is the node as the tracker knows it.
	Info tracker.NodeInfo
	// NodePorts4 and NodePorts6 say at which of the node's addresses NodePorts
	// answer.
	NodePorts4, NodePorts6 NodePorts
	// ServiceCIDRs is the ranges cluster IPs are taken from, masked. Packets to an
	// address in them that no Service has are dropped. Empty means not known.
	ServiceCIDRs []netip.Prefix
	// LocalTraffic tells pod traffic from other traffic.
	LocalTraffic LocalTraffic
	// MasqueradeAll replaces the source address of everything sent to a cluster
	// IP.
	MasqueradeAll bool
	// HashSeed is what the choice of endpoints by hash (see [Service.Hash]) depends
	// on besides the endpoints and the connection, 0 as good as any other.
	HashSeed uint64
}

// NodePorts returns the family's NodePort addresses.
func (n *Node) NodePorts(f tracker.Family) NodePorts {
	if f == tracker.IPv6 {
		return n.NodePorts6
	}
	return n.NodePorts4
}

// NodePorts says at which of the node's own addresses of one family NodePorts
// answer. Loopback addresses are never among them. The zero value is none.
type NodePorts struct {
	// All is every address of the node.
	All bool
	// Prefixes, if not All, is every address of the node that is in one of them.
	Prefixes []netip.Prefix
}

// LocalTraffic tells packets sent by this node's pods from others. Exactly one
// of its fields is set, or none: the zero value recognises no traffic as local,
// as when the cluster's pod ranges are not known.
type LocalTraffic struct {
	// CIDRs: packets from an address in one of them. Families without one
	// recognise no traffic as local.
	CIDRs []netip.Prefix
	// Bridge: packets that come in by the interface of this name.
	Bridge string
	// InterfacePrefix: packets that come in by an interface whose name begins so.
	InterfacePrefix string
}

// Detects reports whether pod traffic of the family can be told from other
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

// Recognises reports whether a packet with this source, that came in by the
// interface of this name ("" if the node itself sent it), comes from one of this
// node's pods, as far as can be told. Its source counts though the node itself
// sent it: an address of the pods' is answered through the node in any case.
func (l LocalTraffic) Recognises(from netip.Addr, in string) bool {
	switch {
	case l.Bridge != "":
		return in == l.Bridge
	case l.InterfacePrefix != "":
		return strings.HasPrefix(in, l.InterfacePrefix)
	}
	return containsAddr(l.CIDRs, canonical(from))
}
