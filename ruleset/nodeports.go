package ruleset

import (
	"errors"
	"fmt"
	"net/netip"

	"github.com/go-proxier/proxier/tracker"
)

// NodePortAddresses is the choice of a node's own addresses at which NodePorts
// answer (kube-proxy's --nodeport-addresses). The zero value is all of them.
type NodePortAddresses struct {
	primary  bool
	prefixes []netip.Prefix
}

// ErrNodePortAddresses is wrapped by the errors of [ParseNodePortAddresses] and
// [NewNodePortAddresses].
var ErrNodePortAddresses = errors.New("ruleset: bad NodePort addresses")

// ParseNodePortAddresses reads the choice as kube-proxy's --nodeport-addresses
// has it: nothing for all addresses, or any combination of CIDRs, for the addresses
// within them, and of the keywords "primary", for the addresses the Node object
// gives, "all", for 0.0.0.0/0 and ::/0, and "localhost", for 127.0.0.0/8 and
// ::1/128. A family that nothing in the list is of is not restricted. The error is
// an [ErrNodePortAddresses] that names the bad value.
func ParseNodePortAddresses(values []string) (NodePortAddresses, error) {
	primary := false
	var prefixes []netip.Prefix
	for _, v := range values {
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

// NewNodePortAddresses returns the choice that consists of the node's addresses
// within prefixes and, if primary is set, the addresses that the Node object
// gives. A single address a is netip.PrefixFrom(a, a.BitLen()). As in
// [ParseNodePortAddresses], a family that has no prefix is not restricted unless
// primary is set. The error wraps [ErrNodePortAddresses] and names a prefix that is
// invalid or IPv4-mapped.
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

// Resolve returns what the choice comes to on a node, in one family. Loopback
// addresses are never part of it. A /0 stands for all addresses whatever else is
// given.
func (n NodePortAddresses) Resolve(info tracker.NodeInfo, f tracker.Family) NodePorts {
	given := n.primary
	var within []netip.Prefix
	for _, p := range n.prefixes {
		if tracker.FamilyOf(p.Addr()) != f {
			continue
		}
		if p.Bits() == 0 {
			return NodePorts{All: true}
		}
		given = true
		if !p.Addr().IsLoopback() {
			within = append(within, p)
		}
	}
	if n.primary {
		for _, a := range info.Addresses {
			if a = a.Unmap().WithZone(""); tracker.FamilyOf(a) == f && !a.IsLoopback() {
				within = append(within, single(a))
			}
		}
	}
	if !given {
		return NodePorts{All: true}
	}
	return NodePorts{Prefixes: reducePrefixes(within)}
}

// Allows reports whether NodePorts answer at a, which must be one of the node's
// own addresses.
func (n NodePorts) Allows(a netip.Addr) bool {
	a = a.Unmap().WithZone("")
	return !a.IsLoopback() && (n.All || containsAddr(n.Prefixes, a))
}
