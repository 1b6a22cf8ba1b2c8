package ruleset

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"

	"github.com/go-proxier/proxier/tracker"
)

// NodePortAddresses selects the node's own addresses that serve NodePorts
// (kube-proxy's --nodeport-addresses). The zero value selects all of them.
type NodePortAddresses struct {
	primary  bool
	prefixes []netip.Prefix
}

// ErrNodePortAddresses is wrapped by the errors of [ParseNodePortAddresses] and
// [NewNodePortAddresses].
var ErrNodePortAddresses = errors.New("ruleset: invalid NodePort addresses")

// ParseNodePortAddresses parses a list of values in the format of kube-proxy's
// --nodeport-addresses. An empty list selects all addresses. A CIDR selects the
// addresses in it. The keyword "primary" selects the addresses in the Node object.
// "all" means 0.0.0.0/0 and ::/0, and "localhost" means 127.0.0.0/8 and ::1/128. A
// keyword must not occur twice. A family is not restricted if the list has no value for
// it. The error wraps [ErrNodePortAddresses] and contains the invalid value.
func ParseNodePortAddresses(values []string) (NodePortAddresses, error) {
	primary := false
	var prefixes []netip.Prefix
	for i, v := range values {
		switch v {
		case "primary", "all", "localhost":
			if slices.Contains(values[:i], v) {
				return NodePortAddresses{}, fmt.Errorf("%w: %q occurs twice", ErrNodePortAddresses, v)
			}
		}
		switch v {
		case "primary":
			primary = true
			continue
		case "all":
			prefixes = append(prefixes, netip.PrefixFrom(netip.IPv4Unspecified(), 0), netip.PrefixFrom(netip.IPv6Unspecified(), 0))
			continue
		case "localhost":
			prefixes = append(prefixes, netip.PrefixFrom(netip.AddrFrom4([4]byte{127}), 8), netip.PrefixFrom(netip.IPv6Loopback(), 128))
			continue
		}
		p, err := netip.ParsePrefix(v)
		if err != nil {
			return NodePortAddresses{}, fmt.Errorf("%w: %w", ErrNodePortAddresses, err)
		}
		prefixes = append(prefixes, p)
	}
	return NewNodePortAddresses(primary, prefixes...)
}

// NewNodePortAddresses returns a NodePortAddresses that selects the node's addresses
// in prefixes and, if primary is set, the addresses in the Node object. For a single
// address a, pass netip.PrefixFrom(a, a.BitLen()). As in [ParseNodePortAddresses], a
// family without a prefix is not restricted unless primary is set. If a prefix is
// invalid or IPv4-mapped, the error wraps [ErrNodePortAddresses] and contains the
// prefix.
func NewNodePortAddresses(primary bool, prefixes ...netip.Prefix) (NodePortAddresses, error) {
	n := NodePortAddresses{primary: primary}
	for _, p := range prefixes {
		if !p.IsValid() {
			return NodePortAddresses{}, fmt.Errorf("%w: %v", ErrNodePortAddresses, p)
		}
		if p.Addr().Is4In6() {
			return NodePortAddresses{}, fmt.Errorf("%w: %q: IPv4-mapped", ErrNodePortAddresses, p)
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
		loopback = reducePrefixes(loopback)
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
	return NodePorts{Prefixes: reducePrefixes(within), Loopback: loopback}
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
