package dataplane

import (
	"net/netip"
	"slices"

	"github.com/go-proxier/proxier/ruleset"
)

// rule is what a socket does with connections: it stands for one frontend.
type rule struct {
	service  *service
	frontend ruleset.Frontend
	near     *near
}

func (r *rule) equal(o *rule) bool {
	return r == o || r != nil && o != nil && r.service == o.service && r.near == o.near &&
		r.frontend.Kind == o.frontend.Kind && r.frontend.Target == o.frontend.Target &&
		r.frontend.Internal == o.frontend.Internal && slices.Equal(r.frontend.Sources, o.frontend.Sources)
}

// near tells connections that start on this node, in a pod or in a process, from
// others. It is replaced, not changed.
type near struct {
	pods ruleset.LocalTraffic
	own  []netip.Addr // sorted
}

func (n *near) has(from, to netip.Addr) bool {
	// A process of the node that connects to an address of the node does so from
	// the same address, unless it is told to use another.
	if from.IsLoopback() || from == to || n.pods.Recognises(from, "") {
		return true
	}
	_, own := slices.BinarySearchFunc(n.own, from, netip.Addr.Compare)
	return own
}

// target is what a connection from one address to another meets.
func (r *rule) target(from, to netip.Addr) ruleset.Target {
	if !r.frontend.Admits(from) {
		return ruleset.Drop
	}
	return r.frontend.TargetFor(r.near.has(from, to))
}

// listens reports whether a socket is needed: without one, the kernel refuses.
func (r *rule) listens() bool {
	return r != nil && (r.frontend.Target != ruleset.Reject || r.frontend.Internal != ruleset.Reject)
}

// audience is who is to get any answer at all: the sources that are in one
// prefix of each of the lists. Without lists it is everybody.
type audience [][]netip.Prefix

// audience of a rule, whose frontend is at an address. That connections from near
// are to be dropped and others are not does not occur, and is left to target.
func (r *rule) audience(at netip.Addr) audience {
	var a audience
	if len(r.frontend.Sources) != 0 {
		a = append(a, r.frontend.Sources)
	}
	if r.frontend.Target == ruleset.Drop {
		var from []netip.Prefix
		if r.frontend.Internal != ruleset.Drop {
			from = append(from, single(at))
			for _, o := range r.near.own {
				from = append(from, single(o))
			}
			from = append(from, r.near.pods.CIDRs...)
		}
		a = append(a, slices.DeleteFunc(from, func(p netip.Prefix) bool { return p.Addr().Is4() != at.Is4() }))
	}
	return a
}

func (a audience) equal(o audience) bool {
	return slices.EqualFunc(a, o, func(x, y []netip.Prefix) bool { return slices.Equal(x, y) })
}

func single(a netip.Addr) netip.Prefix { return netip.PrefixFrom(a, a.BitLen()) }
