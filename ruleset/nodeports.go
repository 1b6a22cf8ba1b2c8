package ruleset

import (
	"fmt"
	"net/netip"
	"slices"

	"github.com/go-proxier/proxier/internal/cidr"
	"github.com/go-proxier/proxier/tracker"
)

// NodePortAddresses selects the node's own addresses that serve NodePorts
// (kube-proxy's --nodeport-addresses). The zero value selects all of them.
type NodePortAddresses struct {
	primary  bool
	prefixes []netip.Prefix
}

// ParseNodePortAddresses parses a list of values in the format of kube-proxy's
// --nodeport-addresses. An empty list selects all addresses. A CIDR selects the
// addresses in it. The keyword "primary" selects the addresses in the Node object.
// "all" means 0.0.0.0/0 and ::/0, and "localhost" means 127.0.0.0/8 and ::1/128. A
// keyword must not occur twice. A family is not restricted if the list has no value for
// it. The error wraps [ErrConfig] and contains the invalid value.
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

// Resolve returns the selected addresses of a node in one family. A prefix of length 0
// selects all addresses, whatever else is given, except loopback addresses. Only a prefix
// in the loopback range selects those.
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

// Allows reports whether a serves NodePorts. a must be one of the node's own
// addresses. Allows reports false for loopback addresses, for which there is
// [NodePorts.AllowsLoopback].
func (n NodePorts) Allows(a netip.Addr) bool {
	a = a.Unmap().WithZone("")
	return !a.IsLoopback() && (n.All || containsAddr(n.Prefixes, a))
}

// AllowsLoopback reports whether a is a loopback address that serves NodePorts.
func (n NodePorts) AllowsLoopback(a netip.Addr) bool {
	return containsAddr(n.Loopback, a.Unmap().WithZone(""))
}

// containsAddr reports whether a is in one of the prefixes.
func containsAddr(ps []netip.Prefix, a netip.Addr) bool {
	for _, p := range ps {
		if p.Contains(a) {
			return true
		}
	}
	return false
}

// single returns the prefix that holds only a.
func single(a netip.Addr) netip.Prefix { return netip.PrefixFrom(a, a.BitLen()) }
