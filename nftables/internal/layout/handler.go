package layout

import (
	"strconv"

	"github.com/go-proxier/proxier/tracker"
)

// Handler is how connections to a frontend are handled, apart from the pool of endpoints. The
// frontends of many Services share a handler. Each handler has a chain.
type Handler struct {
	Handling Handling
	// Firewall lets only allowed sources connect.
	Firewall bool
	// Sticky sends to a sticky pool. The pool determines its sticky handler, so Buckets and Hash
	// are zero.
	Sticky bool
	// Range is for a range of ports: endpoints see the port that the client uses, and packets are
	// not counted.
	Range bool
	// Buckets is the number of buckets to choose from, 0 if Handling needs no pool.
	Buckets int
	// Hash is the part of a connection that determines its bucket.
	Hash tracker.Hash
}

// Handling is what happens on the way to the pool.
type Handling uint8

// The kinds of handling.
const (
	HandleDirect         Handling = iota // nothing
	HandleNotPods                        // masquerade unless a pod of this node connects
	HandleAlways                         // masquerade
	HandleInternal                       // internal traffic has a handler of its own, other traffic goes to the pool
	HandleInternalOrDrop                 // … or is dropped
	HandleInternalOrPass                 // … or passes
	HandleReject
	HandleDrop
)

// Direct returns the handler that only sends to the pool.
func (h Handler) Direct() Handler {
	h.Handling, h.Firewall = HandleDirect, false
	return h
}

// Unguarded returns the handler without its firewall.
func (h Handler) Unguarded() Handler {
	h.Firewall = false
	return h
}

// Stops reports whether the handler ends all connections.
func (h Handler) Stops() bool { return h.Handling == HandleReject || h.Handling == HandleDrop }

// HasPool reports whether the handler sends connections to a pool.
func (h Handler) HasPool() bool { return h.Sticky || h.Buckets != 0 }

// Chain returns the name of the handler's chain.
func (h Handler) Chain() string {
	name := [...]string{
		HandleDirect: "pool-", HandleNotPods: "cluster-ip-", HandleAlways: "external-", HandleInternal: "local-",
		HandleInternalOrDrop: "local-none", HandleInternalOrPass: "local-pass", HandleReject: ChainNoEndpoints, HandleDrop: ChainNoLocalEndpoints,
	}[h.Handling]
	switch {
	case h.Handling >= HandleInternalOrDrop:
	case h.Sticky && h.Handling == HandleDirect:
		name = ChainSticky
	case h.Sticky:
		name += ChainSticky
	default:
		name += choiceName(h.Buckets, h.Hash)
	}
	if h.Firewall {
		name = "firewall-" + name
	}
	if h.Range {
		name = RangePrefix + name
	}
	return name
}

// RangePrefix begins the names of the chains for ranges of ports that others have, too.
const RangePrefix = "range-"

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

// MaxHandlers is the largest number of handlers that exist: for single ports and for ranges,
// eight for each of the 80 numbers of buckets that BucketsFor returns for up to 1,048,576
// endpoints and for each of the 9 sizes of a table with each of 2 hashes, eight for sticky pools,
// and eight without a pool. There is room for all of them in a dispatch key.
const MaxHandlers = 2 * (8*(80+2*9) + 8 + 8)
