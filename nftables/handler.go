package nftables

import (
	"fmt"
	"strconv"
	"time"

	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/tracker"
)

// handler is how a connection is handled once its frontend is known, apart from the pool
// that it is sent to. Frontends of many Services share a handler. Each has a chain.
type handler struct {
	handling handling
	// firewall lets only allowed sources connect.
	firewall bool
	// buckets is the number of buckets to choose from, 0 where handling needs no pool.
	buckets int
	// affinity is the timeout of sticky pools, or 0.
	affinity time.Duration
	// hash is the part of a connection that its bucket follows from.
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

// internalHandlerOf returns the handler of internal traffic to the frontend, and whether it
// has one of its own.
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
	name := map[handling]string{
		handleNotPods: "cluster-ip-", handleAlways: "external-", handleInternal: "local-",
		handleInternalOrDrop: "local-none", handleReject: chainNoEndpoints, handleDrop: chainNoLocalEndpoints,
	}[h.handling]
	switch {
	case h.handling != handleDirect:
	case h.affinity != 0:
		name = "sticky-"
	default:
		name = "pool-"
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

// maxPlainHandlers is how many handlers without affinity there can be: eight for each of the
// 80 numbers of buckets that bucketsFor returns for up to 1,048,576 endpoints and for each of
// the 9 sizes of a table with each of 2 hashes, and six without a pool. Room is kept for all
// of them, so that users who choose very many affinity timeouts do not leave other Services
// without a handler. maxStickyHandlers is how many with affinity there can be.
const (
	maxPlainHandlers  = 8*(80+2*9) + 6
	maxStickyHandlers = maxHandler - maxPlainHandlers
)

// handlers numbers the handlers that have a chain, from 1. Numbers are given back only when
// the table is rewritten.
type handlers struct {
	number map[handler]uint32
	// uses is, by number, how many dispatch keys have a handler with affinity. Others have
	// noAffinity. No handler has the number 0.
	uses []int
	// sticky is how many handlers have affinity, and used how many of them dispatch keys have.
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

// wasted reports whether many of the handlers with affinity are no longer in use.
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

// use counts a dispatch key, 0 for none, in or out.
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
