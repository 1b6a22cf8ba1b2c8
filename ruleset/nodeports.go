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

// ErrNodePortAddresses is what errors of [ParseNodePortAddresses] are.
var ErrNodePortAddresses = errors.New("ruleset: bad NodePort addresses")

// ParseNodePortAddresses reads the choice as kube-proxy's --nodeport-addresses
// has it: nothing for all addresses; "primary", alone, for the addresses the Node
// object gives; or CIDRs, for the addresses within them. A family that no CIDR is
// of is not restricted. The error is an [ErrNodePortAddresses] that names the bad
// value.
func ParseNodePortAddresses(values []string) (NodePortAddresses, error) {
	if len(values) == 1 && values[0] == "primary" {
		return NodePortAddresses{primary: true}, nil
	}
	var n NodePortAddresses
	for _, v := range values {
		if v == "primary" {
			return NodePortAddresses{}, fmt.Errorf("%w: \"primary\" must stand alone", ErrNodePortAddresses)
		}
		p, err := netip.ParsePrefix(v)
		if err != nil {
			return NodePortAddresses{}, fmt.Errorf("%w: %w", ErrNodePortAddresses, err)
		}
		if p.Addr().Is4In6() {
			return NodePortAddresses{}, fmt.Errorf("%w: %q: IPv4-mapped", ErrNodePortAddresses, v)
		}
		n.prefixes = append(n.prefixes, p.Masked())
	}
	return n, nil
}

// Resolve returns what the choice comes to on a node, in one family. Loopback
// addresses are never part of it. A /0 stands for all addresses whatever else is
// given.
func (n NodePortAddresses) Resolve(info tracker.NodeInfo, f tracker.Family) NodePorts {
	if n.primary {
		var own []netip.Prefix
		for _, a := range info.Addresses {
			if a = a.Unmap().WithZone(""); tracker.FamilyOf(a) == f && !a.IsLoopback() {
				own = append(own, single(a))
			}
		}
		return NodePorts{Prefixes: reducePrefixes(own)}
	}
	given := false
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
