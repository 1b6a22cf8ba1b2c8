package nftables

import (
	"strconv"

	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/tracker"
)

// handler is how connections to a frontend are handled, apart from the pool of endpoints. The
// frontends of many Services share a handler. Each handler has a chain.
type handler struct {
	handling handling
	// firewall lets only allowed sources connect.
	firewall bool
	// sticky sends to a sticky pool. The pool determines its sticky handler, so buckets and hash
	// are zero.
	sticky bool
	// buckets is the number of buckets to choose from, 0 if handling needs no pool.
	buckets int
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

// targets are the targets that have a pool.
var targets = [...]ruleset.Target{ruleset.ToCluster, ruleset.ToLocal}

// stickyTargets tells, by target, whether a Service's pool is sticky.
type stickyTargets [ruleset.Drop + 1]bool

// wantedSticky returns the targets whose pools should be sticky: all of a Service with client
// affinity.
func wantedSticky(s *ruleset.Service) (out stickyTargets) {
	for _, target := range targets {
		out[target] = s.Port.Affinity != 0
	}
	return out
}

// handlerOf returns the handler of a frontend of the Service.
func handlerOf(s *ruleset.Service, f *ruleset.Frontend, sticky stickyTargets) handler {
	var h handler
	if f.Target == ruleset.ToCluster || f.Target == ruleset.ToLocal {
		h = poolHandler(s, f.Target, sticky)
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

// hasInternalHandler reports whether internal traffic to the frontend has a handler of its own,
// which sends to the pool of [ruleset.ToCluster].
func hasInternalHandler(f *ruleset.Frontend) bool {
	return f.ShortCircuit() && f.Internal == ruleset.ToCluster
}

// poolHandler returns the handler that only sends to the Service's pool for a target.
func poolHandler(s *ruleset.Service, t ruleset.Target, sticky stickyTargets) handler {
	if sticky[t] {
		return handler{sticky: true}
	}
	return handler{buckets: handlerBuckets(s, t), hash: s.Hash()}
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

// hasPool reports whether the handler sends connections to a pool.
func (h handler) hasPool() bool { return h.sticky || h.buckets != 0 }

// chain returns the name of the handler's chain.
func (h handler) chain() string {
	name := [...]string{
		handleDirect: "pool-", handleNotPods: "cluster-ip-", handleAlways: "external-", handleInternal: "local-",
		handleInternalOrDrop: "local-none", handleReject: chainNoEndpoints, handleDrop: chainNoLocalEndpoints,
	}[h.handling]
	switch {
	case h.handling >= handleInternalOrDrop:
	case h.sticky && h.handling == handleDirect:
		name = chainSticky
	case h.sticky:
		name += chainSticky
	default:
		name += choiceName(h.buckets, h.hash)
	}
	if h.firewall {
		return "firewall-" + name
	}
	return name
}

// choiceName names how a handler chooses a bucket.
func choiceName(buckets int, by tracker.Hash) string {
	out := strconv.Itoa(buckets)
	switch by {
	case tracker.HashSource:
		return "by-source-" + out
	case tracker.HashSourcePort:
		return "by-port-" + out
	}
	return out
}

// maxHandlers is the largest number of handlers that exist: eight for each of the 80 numbers of
// buckets that bucketsFor returns for up to 1,048,576 endpoints and for each of the 9 sizes of a
// table with each of 2 hashes, eight for sticky pools, and six without a pool. There is room for
// all of them in a dispatch key.
const maxHandlers = 8*(80+2*9) + 8 + 6

// handlers numbers the handlers that have a chain, from 1. A number is never given back.
type handlers map[handler]uint32

// add numbers a handler.
func (l handlers) add(h handler) uint32 {
	n := uint32(len(l) + 1)
	l[h] = n
	return n
}
