package nftables

import (
	"fmt"
	"strconv"
	"time"

	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/tracker"
)

// handler is how a connection is handled once its frontend is known, apart from
// the pool it is sent to. The frontends of many Services share one, and each has
// one chain.
type handler struct {
	handling handling
	// firewall: only allowed sources may connect.
	firewall bool
	// buckets is the number of buckets to draw from, 0 where handling needs no pool.
	buckets int
	// affinity is the sticky pools' timeout, or 0.
	affinity time.Duration
	// hash is from what of a connection its bucket follows.
	hash tracker.Hash
}

// handling is what happens on the way to the pool.
type handling uint8

const (
	handleDirect         handling = iota // nothing
	handleNotPods                        // masquerade, unless from a pod of this node
	handleAlways                         // masquerade
	handleInternal                       // a pod of this node, or the node, goes the internal way; others to the pool
	handleInternalOrDrop                 // … and others are dropped
	handleReject
	handleDrop
)

// handlerOf returns the handler of a frontend of the Service.
func handlerOf(s *ruleset.Service, f *ruleset.Frontend) handler {
	c := handler{firewall: len(f.Sources) != 0}
	if f.Target == ruleset.ToCluster || f.Target == ruleset.ToLocal {
		c.buckets, c.affinity, c.hash = handlerBuckets(s, f.Target), s.Port.Affinity, s.Hash()
	}
	switch {
	case f.Target == ruleset.Reject:
		c.handling = handleReject
	case f.Target == ruleset.Drop && f.Near == ruleset.ToCluster:
		c.handling = handleInternalOrDrop
	case f.Target == ruleset.Drop:
		c.handling = handleDrop
	case f.Masquerade == ruleset.MasqueradeAlways:
		c.handling = handleAlways
	case f.Masquerade == ruleset.MasqueradeNotPods:
		c.handling = handleNotPods
	case f.Masquerade == ruleset.MasqueradeNode:
		c.handling = handleInternal
	}
	return c
}

// internalHandlerOf returns the handler of internal traffic to the frontend, and whether that
// is handled apart.
func internalHandlerOf(s *ruleset.Service, f *ruleset.Frontend) (handler, bool) {
	if !f.ShortCircuit() || f.Near != ruleset.ToCluster {
		return handler{}, false
	}
	return handler{buckets: handlerBuckets(s, ruleset.ToCluster), affinity: s.Port.Affinity, hash: s.Hash()}, true
}

// maxPlainHandlers is how many handlers without affinity there can be: eight for
// each of the 80 numbers of buckets that bucketsFor gives for up to 1,048,576
// endpoints and for each of the 9 sizes of a table with each of 2 hashes, and six
// without a pool. Room is kept for all of them: affinity
// timeouts are for users to choose, and whoever chooses very many must not leave
// others' Services without a handler. maxStickyHandlers is how many with affinity
// there can be.
const (
	maxPlainHandlers  = 8*(80+2*9) + 6
	maxStickyHandlers = maxHandler - maxPlainHandlers
)

// handlers numbers the handlers that have a chain, from 1. None is given back before
// the table is written anew.
type handlers struct {
	number map[handler]uint32
	// uses is by number, behind one that none has.
	uses []handlerUses
	// sticky is how many have affinity, and used how many of these any dispatch keys.
	sticky, used int
}

// handlerUses is how many dispatch keys there are of a handler, if it has affinity.
type handlerUses struct {
	sticky bool
	n      int
}

func newHandlers() handlers {
	return handlers{number: map[handler]uint32{}, uses: make([]handlerUses, 1)}
}

// room reports whether there is room for more handlers.
func (c *handlers) room(more []handler) bool {
	plain, sticky := len(c.number)-c.sticky, c.sticky
	for _, m := range more {
		if m.affinity != 0 {
			sticky++
		} else {
			plain++
		}
	}
	return plain <= maxPlainHandlers && (sticky <= maxStickyHandlers || sticky == c.sticky)
}

// wasted reports whether many of the handlers with affinity have no dispatch keys any
// more.
func (c *handlers) wasted() bool { return c.sticky-c.used >= maxStickyHandlers/8 }

// add numbers a handler.
func (c *handlers) add(k handler) uint32 {
	c.uses = append(c.uses, handlerUses{sticky: k.affinity != 0})
	if k.affinity != 0 {
		c.sticky++
	}
	n := uint32(len(c.number) + 1)
	c.number[k] = n
	return n
}

// use changes by how many the dispatch keys of a dispatch key's handler are; 0 is none.
func (c *handlers) use(dispatchKey uint32, by int) {
	u := &c.uses[dispatchKey&^dispatchMark>>handlerShift]
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

// stops reports whether connections of the handler end, whoever makes them.
func (c handler) stops() bool { return c.handling == handleReject || c.handling == handleDrop }

// direct is the handler that only sends to the pool.
func (c handler) direct() handler {
	return handler{buckets: c.buckets, affinity: c.affinity, hash: c.hash}
}

// chain is the name of the handler's chain.
func (c handler) chain() string {
	var name string
	switch c.handling {
	case handleReject:
		name = chainNoEndpoints
	case handleDrop:
		name = chainNoLocalEndpoints
	case handleInternalOrDrop:
		name = "local-none"
	case handleInternal:
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

func (c handler) size() string {
	size := strconv.Itoa(c.buckets)
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

// unguarded is the handler without its firewall.
func (c handler) unguarded() handler {
	c.firewall = false
	return c
}
