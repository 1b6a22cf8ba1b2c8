package nftables

import (
	"fmt"
	"strconv"
	"time"

	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/tracker"
)

// handler is how connections to a frontend are handled, apart from the pool of endpoints. The
// frontends of many Services share a handler. Each handler has a chain.
type handler struct {
	handling handling
	// firewall lets only allowed sources connect.
	firewall bool
	// buckets is the number of buckets to choose from, 0 if handling needs no pool.
	buckets int
	// affinity is the timeout of sticky pools, or 0.
	affinity time.Duration
	// hash is the part of a connection that determines its bucket.
	hash tracker.Hash
}

// handling is what happens on the way to the pool.
type handling uint8

const (
	handleDirect         handling = iota // nothing
	handleNotPods                        // masquerade unless a pod of this node connects
	handleAlways                         // masquerade
	handleInternal                       // internal traffic has a handler of its own, other traffic goes to the pool
	handleInternalOrDrop                 // … or is dropped
	handleReject
	handleDrop
)

// handlerOf returns the handler of a frontend of the Service.
func handlerOf(s *ruleset.Service, f *ruleset.Frontend) handler {
	var h handler
	if f.Target == ruleset.ToCluster || f.Target == ruleset.ToLocal {
		h = poolHandler(s, f.Target)
	}
	h.firewall = len(f.Sources) != 0
	switch {
	case f.Target == ruleset.Reject:
		h.handling = handleReject
	case f.Target == ruleset.Drop && f.Internal == ruleset.ToCluster:
		h.handling = handleInternalOrDrop
	case f.Target == ruleset.Drop:
		h.handling = handleDrop
	case f.Masquerade == ruleset.MasqueradeAlways:
		h.handling = handleAlways
	case f.Masquerade == ruleset.MasqueradeNotPods:
		h.handling = handleNotPods
	case f.Masquerade == ruleset.MasqueradeNode:
		h.handling = handleInternal
	}
	return h
}

// internalHandlerOf returns the handler of internal traffic to the frontend. It reports false
// if internal traffic has no handler of its own.
func internalHandlerOf(s *ruleset.Service, f *ruleset.Frontend) (handler, bool) {
	if !f.ShortCircuit() || f.Internal != ruleset.ToCluster {
		return handler{}, false
	}
	return poolHandler(s, ruleset.ToCluster), true
}

// poolHandler returns the handler that only sends to the Service's pool for a target.
func poolHandler(s *ruleset.Service, t ruleset.Target) handler {
	return handler{buckets: handlerBuckets(s, t), affinity: s.Port.Affinity, hash: s.Hash()}
}

// direct returns the handler that only sends to the pool.
func (h handler) direct() handler {
	h.handling, h.firewall = handleDirect, false
	return h
}

// unguarded returns the handler without its firewall.
func (h handler) unguarded() handler {
	h.firewall = false
	return h
}

// stops reports whether the handler ends all connections.
func (h handler) stops() bool { return h.handling == handleReject || h.handling == handleDrop }

// chain returns the name of the handler's chain.
func (h handler) chain() string {
	name := [...]string{
		handleDirect: "pool-", handleNotPods: "cluster-ip-", handleAlways: "external-", handleInternal: "local-",
		handleInternalOrDrop: "local-none", handleReject: chainNoEndpoints, handleDrop: chainNoLocalEndpoints,
	}[h.handling]
	if h.handling == handleDirect && h.affinity != 0 {
		name = "sticky-"
	}
	if h.handling < handleInternalOrDrop {
		name += h.choice()
	}
	if h.firewall {
		return "firewall-" + name
	}
	return name
}

// choice names how the handler chooses a bucket.
func (h handler) choice() string {
	out := strconv.Itoa(h.buckets)
	switch h.hash {
	case tracker.HashSource:
		out = "by-source-" + out
	case tracker.HashSourcePort:
		out = "by-port-" + out
	}
	if h.affinity != 0 {
		return fmt.Sprintf("%s-%ds", out, seconds(h.affinity))
	}
	return out
}

// maxPlainHandlers is the largest number of handlers without affinity: eight for each of the 80
// numbers of buckets that bucketsFor returns for up to 1,048,576 endpoints and for each of the 9
// sizes of a table with each of 2 hashes, and six without a pool. Room is reserved for all of
// them, so that very many affinity timeouts do not leave other Services without a handler.
// maxStickyHandlers is the largest number of handlers with affinity.
const (
	maxPlainHandlers  = 8*(80+2*9) + 6
	maxStickyHandlers = maxHandler - maxPlainHandlers
)

// handlers numbers the handlers that have a chain, from 1. Only a rewrite of the table frees
// numbers.
type handlers struct {
	number map[handler]uint32
	// uses counts, by number, the dispatch keys of a handler with affinity. Other handlers have
	// noAffinity. No handler has the number 0.
	uses []int
	// sticky counts the handlers with affinity. used counts those that have dispatch keys.
	sticky, used int
}

const noAffinity = -1

func newHandlers() handlers {
	return handlers{number: map[handler]uint32{}, uses: []int{noAffinity}}
}

// room reports whether there is room for more handlers.
func (l *handlers) room(more []handler) bool {
	plain, sticky := len(l.number)-l.sticky, l.sticky
	for _, h := range more {
		if h.affinity != 0 {
			sticky++
		} else {
			plain++
		}
	}
	return plain <= maxPlainHandlers && (sticky <= maxStickyHandlers || sticky == l.sticky)
}

// wasted reports whether many handlers with affinity are no longer in use.
func (l *handlers) wasted() bool { return l.sticky-l.used >= maxStickyHandlers/8 }

// add numbers a handler.
func (l *handlers) add(h handler) uint32 {
	if h.affinity != 0 {
		l.sticky++
		l.uses = append(l.uses, 0)
	} else {
		l.uses = append(l.uses, noAffinity)
	}
	n := uint32(len(l.number) + 1)
	l.number[h] = n
	return n
}

// use adds by to the use count of a dispatch key's handler. The key 0 has no effect.
func (l *handlers) use(key uint32, by int) {
	uses := &l.uses[key&^dispatchMark>>handlerShift]
	if *uses == noAffinity {
		return
	}
	if *uses == 0 {
		l.used++
	}
	if *uses += by; *uses == 0 {
		l.used--
	}
}
