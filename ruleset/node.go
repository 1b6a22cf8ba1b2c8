package ruleset

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"github.com/go-proxier/proxier/internal/cidr"
	"github.com/go-proxier/proxier/tracker"
)

// Node holds the settings of the node as a whole, a part of every [Delta]. A published Node never changes.
type Node struct {
	// Info is the tracker's information about the node.
	Info tracker.NodeInfo
	// NodePorts4 and NodePorts6 are the node's addresses that serve NodePorts.
	NodePorts4, NodePorts6 NodePorts
	// ServiceCIDRs holds the ranges of cluster IPs without the addresses known to be in use otherwise, masked.
	// Packets to an address in them that no Service has are dropped. Empty means unknown.
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
	// Loopback means, whatever All is, the loopback addresses in these prefixes. A data plane in the kernel may
	// ignore it: packets from loopback addresses cannot leave the node.
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

// Recognizes reports whether l recognizes a packet as coming from one of this node's pods. from is its source
// address, and in the name of the interface on which it arrived, or "" if the node itself sent it. CIDRs apply to
// packets of the node itself, too: replies to a pod address pass through the node in any case.
func (l LocalTraffic) Recognizes(from netip.Addr, in string) bool {
	switch {
	case l.Bridge != "":
		return in == l.Bridge
	case l.InterfacePrefix != "":
		return strings.HasPrefix(in, l.InterfacePrefix)
	}
	return containsAddr(l.CIDRs, canonical(from))
}

// NodePortAddresses selects the node's own addresses that serve NodePorts
// (kube-proxy's --nodeport-addresses). The zero value selects all of them.
type NodePortAddresses struct {
	primary  bool
	prefixes []netip.Prefix
}

// ParseNodePortAddresses parses values of kube-proxy's --nodeport-addresses. An empty list selects all addresses, and
// a CIDR those in it. The keyword "primary" selects the addresses in the Node object, "all" means 0.0.0.0/0 and ::/0,
// and "localhost" means 127.0.0.0/8 and ::1/128. A keyword must not occur twice. A family is not restricted if the
// list has no value for it. The error wraps [ErrConfig] and contains the invalid value.
func ParseNodePortAddresses(values []string) (NodePortAddresses, error) {
	var n NodePortAddresses
	for i, v := range values {
		switch v {
		case "primary", "all", "localhost":
			if slices.Contains(values[:i], v) {
				return NodePortAddresses{}, fmt.Errorf("ruleset: %w: NodePort addresses: %q occurs twice", ErrConfig, v)
			}
		}
		switch v {
		case "primary":
			n.primary = true
			continue
		case "all":
			n.prefixes = append(n.prefixes, netip.PrefixFrom(netip.IPv4Unspecified(), 0), netip.PrefixFrom(netip.IPv6Unspecified(), 0))
			continue
		case "localhost":
			n.prefixes = append(n.prefixes, netip.PrefixFrom(netip.AddrFrom4([4]byte{127}), 8), netip.PrefixFrom(netip.IPv6Loopback(), 128))
			continue
		}
		p, err := netip.ParsePrefix(v)
		if err != nil {
			return NodePortAddresses{}, fmt.Errorf("ruleset: %w: NodePort addresses: %w", ErrConfig, err)
		}
		if p.Addr().Is4In6() {
			return NodePortAddresses{}, fmt.Errorf("ruleset: %w: NodePort addresses: %q: IPv4-mapped", ErrConfig, p)
		}
		n.prefixes = append(n.prefixes, p.Masked())
	}
	return n, nil
}

// Resolve returns the selected addresses of a node in one family. A prefix of length 0 selects all addresses except
// loopback addresses, which only a prefix in the loopback range selects.
func (n NodePortAddresses) Resolve(info tracker.NodeInfo, f tracker.Family) NodePorts {
	given, all := n.primary, false
	var within, loopback []netip.Prefix
	for _, p := range n.prefixes {
		if tracker.FamilyOf(p.Addr()) != f {
			continue
		}
		given = true
		switch {
		case p.Bits() == 0:
			all = true
		case p.Addr().IsLoopback():
			loopback = append(loopback, p)
		default:
			within = append(within, p)
		}
	}
	if len(loopback) != 0 {
		loopback = cidr.Reduce(loopback)
	}
	if n.primary {
		for _, a := range info.Addresses {
			if a = a.Unmap().WithZone(""); tracker.FamilyOf(a) == f && !a.IsLoopback() {
				within = append(within, single(a))
			}
		}
	}
	if all || !given {
		return NodePorts{All: true, Loopback: loopback}
	}
	return NodePorts{Prefixes: cidr.Reduce(within), Loopback: loopback}
}

// Allows reports whether a, one of the node's own addresses, serves NodePorts. It reports false for loopback
// addresses: see [NodePorts.AllowsLoopback].
func (n NodePorts) Allows(a netip.Addr) bool {
	a = a.Unmap().WithZone("")
	return !a.IsLoopback() && (n.All || containsAddr(n.Prefixes, a))
}

// AllowsLoopback reports whether a is a loopback address that serves NodePorts.
func (n NodePorts) AllowsLoopback(a netip.Addr) bool {
	return containsAddr(n.Loopback, a.Unmap().WithZone(""))
}

func containsAddr(ps []netip.Prefix, a netip.Addr) bool {
	for _, p := range ps {
		if p.Contains(a) {
			return true
		}
	}
	return false
}

func single(a netip.Addr) netip.Prefix { return netip.PrefixFrom(a, a.BitLen()) }
