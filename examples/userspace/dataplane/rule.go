package dataplane

import (
	"net/netip"
	"slices"

	"github.com/go-proxier/proxier/ruleset"
)

// rule is the treatment of connections to one frontend at one place.
type rule struct {
	place
	service  *service
	frontend ruleset.Frontend
	internal *internalTraffic
}

func (r *rule) equal(o *rule) bool {
	return r == o || r != nil && o != nil && r.service == o.service && r.internal == o.internal &&
		r.frontend.Kind == o.frontend.Kind && r.frontend.Target == o.frontend.Target &&
		r.frontend.Internal == o.frontend.Internal && slices.Equal(r.frontend.Sources, o.frontend.Sources)
}

// rank returns the rule's index among the rules of a binding.
func (r *rule) rank() int {
	if r.frontend.Kind == ruleset.KindNodePort {
		return 1
	}
	return 0
}

// internalTraffic recognizes connections that start on this node, in a pod or in a process.
// It is immutable.
type internalTraffic struct {
	pods ruleset.LocalTraffic
	own  []netip.Addr // sorted
}

func (n *internalTraffic) has(from, to netip.Addr) bool {
	// By default, the source of a node's process that connects to one of the node's
	// addresses is the same address.
	if from.IsLoopback() || from == to || n.pods.Recognizes(from, "") {
		return true
	}
	_, own := slices.BinarySearchFunc(n.own, from, netip.Addr.Compare)
	return own
}

// target returns the target of a connection from one address to another.
func (r *rule) target(from, to netip.Addr) ruleset.Target {
	if !r.frontend.Admits(from) {
		return ruleset.TargetDrop
	}
	return r.frontend.TargetFor(r.internal.has(from, to))
}

// listens reports whether the rule needs a socket. Without one the kernel refuses
// connections.
func (r *rule) listens() bool {
	return r != nil && (r.frontend.Target != ruleset.TargetReject || r.frontend.Internal != ruleset.TargetReject)
}

// audience is the set of sources that get an answer: those that are in one prefix of each
// list. Without lists it contains every source.
type audience [][]netip.Prefix

// audience returns the audience of a rule. Rules that drop internal connections alone do not occur; target handles them.
func (r *rule) audience() (a audience) {
	at := r.at.Addr()
	if len(r.frontend.Sources) != 0 {
		a = append(a, r.frontend.Sources)
	}
	if r.frontend.Target == ruleset.TargetDrop {
		var from []netip.Prefix
		if r.frontend.Internal != ruleset.TargetDrop {
			from = append(from, single(at))
			for _, o := range r.internal.own {
				from = append(from, single(o))
			}
			from = append(from, r.internal.pods.CIDRs...)
		}
		a = append(a, slices.DeleteFunc(from, func(p netip.Prefix) bool { return p.Addr().Is4() != at.Is4() }))
	}
	return a
}

func single(a netip.Addr) netip.Prefix { return netip.PrefixFrom(a, a.BitLen()) }
