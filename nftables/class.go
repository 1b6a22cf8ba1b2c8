//go:build linux

package nftables

import (
	"fmt"
	"strconv"
	"time"

	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/tracker"
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
	// hash is from what of a connection its slot follows.
	hash tracker.Hash
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

// classOf returns the class of a frontend of the Service.
func classOf(s *ruleset.Service, f *ruleset.Frontend) class {
	c := class{firewall: len(f.Sources) != 0}
	if f.Target == ruleset.ToCluster || f.Target == ruleset.ToLocal {
		c.slots, c.affinity, c.hash = classSlots(s, f.Target), s.Port.Affinity, s.Hash()
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

// nearClassOf returns the class of near traffic to the frontend, and whether that
// is handled apart.
func nearClassOf(s *ruleset.Service, f *ruleset.Frontend) (class, bool) {
	if !f.ShortCircuit() || f.Near != ruleset.ToCluster {
		return class{}, false
	}
	return class{slots: classSlots(s, ruleset.ToCluster), affinity: s.Port.Affinity, hash: s.Hash()}, true
}

// maxPlainClasses is how many classes without affinity there can be: eight for
// each of the 80 numbers of slots that slotsFor gives for up to 1,048,576
// endpoints and for each of the 9 sizes of a table with each of 2 hashes, and six
// without a pool. Room is kept for all of them: affinity
// timeouts are for users to choose, and whoever chooses very many must not leave
// others' Services without a class. maxStickyClasses is how many with affinity
// there can be.
const (
	maxPlainClasses  = 8*(80+2*9) + 6
	maxStickyClasses = maxClass - maxPlainClasses
)

// classes numbers the classes that have a chain, from 1. None is given back before
// the table is written anew.
type classes struct {
	number map[class]uint32
	// uses is by number, behind one that none has.
	uses []classUses
	// sticky is how many have affinity, and used how many of these any tickets.
	sticky, used int
}

// classUses is how many tickets there are of a class, if it has affinity.
type classUses struct {
	sticky bool
	n      int
}

func newClasses() classes {
	return classes{number: map[class]uint32{}, uses: make([]classUses, 1)}
}

// room reports whether there is room for more classes.
func (c *classes) room(more []class) bool {
	plain, sticky := len(c.number)-c.sticky, c.sticky
	for _, m := range more {
		if m.affinity != 0 {
			sticky++
		} else {
			plain++
		}
	}
	return plain <= maxPlainClasses && (sticky <= maxStickyClasses || sticky == c.sticky)
}

// wasted reports whether many of the classes with affinity have no tickets any
// more.
func (c *classes) wasted() bool { return c.sticky-c.used >= maxStickyClasses/8 }

// add numbers a class.
func (c *classes) add(k class) uint32 {
	c.uses = append(c.uses, classUses{sticky: k.affinity != 0})
	if k.affinity != 0 {
		c.sticky++
	}
	n := uint32(len(c.number) + 1)
	c.number[k] = n
	return n
}

// use changes by how many the tickets of a ticket's class are; 0 is none.
func (c *classes) use(ticket uint32, by int) {
	u := &c.uses[ticket&^ticketMark>>classShift]
	if !u.sticky {
		return
	}
	if u.n == 0 {
		c.used++
	}
	if u.n += by; u.n == 0 {
		c.used--
	}
}

// stops reports whether connections of the class end, whoever makes them.
func (c class) stops() bool { return c.handling == handleReject || c.handling == handleDrop }

// direct is the class that only sends to the pool.
func (c class) direct() class {
	return class{slots: c.slots, affinity: c.affinity, hash: c.hash}
}

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
	size := strconv.Itoa(c.slots)
	switch c.hash {
	case tracker.HashSource:
		size = "by-source-" + size
	case tracker.HashSourcePort:
		size = "by-port-" + size
	}
	if c.affinity != 0 {
		return fmt.Sprintf("%s-%ds", size, seconds(c.affinity))
	}
	return size
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
		return stop(w.reject())
	case handleDrop:
		return stop(drop())
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
		return w.stickyChain(c, time.Duration(seconds(c.affinity))*time.Second)
	}
	return w.poolChain(c)
}
