//go:build linux

package nftables

import (
	"fmt"
	"time"

	"github.com/go-proxier/proxier/ruleset"
)

// class is how a connection is handled once its frontend is known, apart from
// the pool it is sent to. The frontends of many Services share one, and each has
// one chain.
type class struct {
	handling handling
	// firewall: only allowed sources may connect.
	firewall bool
	// slots is the number of slots to draw from, 0 where handling needs no pool.
	slots int
	// affinity is the sticky pools' timeout, or 0.
	affinity time.Duration
}

// handling is what happens on the way to the pool.
type handling uint8

const (
	handleDirect     handling = iota // nothing
	handleNotPods                    // masquerade, unless from a pod of this node
	handleAlways                     // masquerade
	handleNear                       // a pod of this node, or the node, goes the near way; others to the pool
	handleNearOrDrop                 // … and others are dropped
	handleReject
	handleDrop
)

// classOf returns the class of a frontend with the given pool, which is the one
// of its Target or nil.
func classOf(f *ruleset.Frontend, p *pool) class {
	c := class{firewall: len(f.Sources) != 0}
	if p != nil {
		c.slots, c.affinity = slotsFor(len(p.slots)), p.affinity
	}
	switch {
	case f.Target == ruleset.Reject:
		c.handling = handleReject
	case f.Target == ruleset.Drop && f.Near == ruleset.ToCluster:
		c.handling = handleNearOrDrop
	case f.Target == ruleset.Drop:
		c.handling = handleDrop
	case f.Masquerade == ruleset.MasqueradeAlways:
		c.handling = handleAlways
	case f.Masquerade == ruleset.MasqueradeNotPods:
		c.handling = handleNotPods
	case f.Masquerade == ruleset.MasqueradeNode:
		c.handling = handleNear
	}
	return c
}

// direct is the class that only sends to the pool.
func (c class) direct() class { return class{slots: c.slots, affinity: c.affinity} }

// chain is the name of the class's chain.
func (c class) chain() string {
	var name string
	switch c.handling {
	case handleReject:
		name = chainNoEndpoints
	case handleDrop:
		name = chainNoLocalEndpoints
	case handleNearOrDrop:
		name = "local-none"
	case handleNear:
		name = "local-" + c.size()
	case handleAlways:
		name = "external-" + c.size()
	case handleNotPods:
		name = "cluster-ip-" + c.size()
	default:
		name = "pool-" + c.size()
		if c.affinity != 0 {
			name = "sticky-" + c.size()
		}
	}
	if c.firewall {
		return "firewall-" + name
	}
	return name
}

func (c class) size() string {
	if c.affinity != 0 {
		return fmt.Sprintf("%d-%ds", c.slots, seconds(c.affinity))
	}
	return fmt.Sprint(c.slots)
}

// unguarded is the class without its firewall.
func (c class) unguarded() class {
	c.firewall = false
	return c
}

// chainRules renders the class's chain. It goes to the chains of the class's
// direct and unguarded forms.
func (c class) chainRules(w rules, local ruleset.LocalTraffic) []rule {
	if c.firewall {
		return []rule{{jump(chainFirewallCheck)}, {gotoChain(c.unguarded().chain())}}
	}
	toPool := rule{gotoChain(c.direct().chain())}
	nearby := func(last rule) []rule {
		var out []rule
		for _, r := range w.isNear(local) {
			out = append(out, r.with(gotoChain(chainNear)))
		}
		node := rule(fib(true)).with(w.markForMasquerade()...).with(gotoChain(chainNear))
		return append(out, node, last)
	}
	switch c.handling {
	case handleReject:
		return []rule{{w.reject()}}
	case handleDrop:
		return []rule{{drop()}}
	case handleNearOrDrop:
		return nearby(rule{drop()})
	case handleNear:
		return nearby(toPool)
	case handleAlways:
		return []rule{rule(w.markForMasquerade()).with(toPool...)}
	case handleNotPods:
		return []rule{w.notNear(local).with(w.markForMasquerade()...), toPool}
	}
	if c.affinity != 0 {
		return w.stickyChain(c.slots, time.Duration(seconds(c.affinity))*time.Second)
	}
	return w.poolChain(c.slots)
}
