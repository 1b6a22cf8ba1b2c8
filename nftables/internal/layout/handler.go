package layout

import (
	"strconv"
	"time"

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

// ToSticky returns the handler for a sticky pool, if it has a pool.
func (h Handler) ToSticky() Handler {
	if h.HasPool() {
		h.Sticky, h.Buckets, h.Hash = true, 0, tracker.HashNone
	}
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
		HandleInternalOrDrop: "local-none", HandleReject: ChainNoEndpoints, HandleDrop: ChainNoLocalEndpoints,
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

// MaxHandlers is the largest number of handlers: eight for each of the 80 numbers of buckets that BucketsFor returns
// for up to 1,048,576 endpoints and for each of the 9 sizes of a table with each of 2 hashes, eight for sticky pools,
// and six without a pool. A dispatch key has room for them.
const MaxHandlers = 8*(80+2*9) + 8 + 6

// StickyHandler is how connections to sticky pools are handled. Each has a chain, which exists while a pool needs it
// and a little longer.
type StickyHandler struct {
	// Buckets and Hash determine how a new client gets its endpoint.
	Buckets int
	Hash    tracker.Hash
	// Seconds is how long the kernel remembers a client, which only rules can set.
	Seconds int64
}

// Chain returns the name of the handler's chain.
func (h StickyHandler) Chain() string {
	return "sticky-" + choiceName(h.Buckets, h.Hash) + "-" + strconv.FormatInt(h.Seconds, 10) + "s"
}

// Chooser returns the name of the chain that gives a client its endpoint. Handlers that differ in
// the timeout share it.
func (h StickyHandler) Chooser() string {
	return "choose-" + choiceName(h.Buckets, h.Hash)
}

// Timeout returns how long the kernel remembers a client.
func (h StickyHandler) Timeout() time.Duration { return time.Duration(h.Seconds) * time.Second }

// Seconds rounds an affinity timeout up to seconds, as in the names of chains and in rules.
func Seconds(d time.Duration) int64 { return int64((d + time.Second - 1) / time.Second) }

// ExactBuckets is the largest number of endpoints up to which every pool has as many buckets
// as endpoints.
const ExactBuckets = 16

// bucketStep returns the difference between the numbers of buckets around n.
func bucketStep(n int) int {
	step := ExactBuckets / 4
	for n > 8*step {
		step *= 2
	}
	return step
}

// BucketsFor returns the number of buckets that a pool of n endpoints draws from: n itself up to 16, and then the
// next of four steps between powers of two, so that there are few chains. After a draw of an empty bucket, the next
// rule draws again.
func BucketsFor(n int) int {
	if n <= ExactBuckets {
		return n
	}
	step := bucketStep(n)
	return (n + step - 1) / step * step
}

// BucketsBelow returns the next smaller number of buckets. A pool that draws from the given
// number has more endpoints than the result.
func BucketsBelow(buckets int) int {
	if buckets <= ExactBuckets+1 {
		return buckets - 1
	}
	return buckets - bucketStep(buckets)
}

// PoolHandlers returns the handler that only sends connections to a pool with the given number of buckets, and
// the sticky handler of such a pool. With a hash, a pool has as many buckets as its table.
func PoolHandlers(buckets int, by tracker.Hash, affinity time.Duration) (Handler, StickyHandler) {
	if by == tracker.HashNone {
		buckets = BucketsFor(buckets)
	}
	return Handler{Buckets: buckets, Hash: by}, StickyHandler{Buckets: buckets, Hash: by, Seconds: Seconds(affinity)}
}
