package balance

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"slices"
	"strings"
	"sync"

	"github.com/go-proxier/proxier/tracker"
)

// Balancer chooses endpoints for the connections to one Service port.
//
// Pick returns an endpoint of pool for a new connection from client, or nil if no endpoint
// has a weight above 0. It neither keeps nor modifies pool. The endpoints in pool must not be
// nil and must have different addresses. Pick is safe for concurrent use.
type Balancer interface {
	Pick(pool []*tracker.Endpoint, client netip.AddrPort) *tracker.Endpoint
}

// Load returns the current number of an endpoint's connections. Pick may call it for every
// endpoint of a pool. It must be safe for concurrent use.
type Load func(netip.AddrPort) int

// lighter reports whether a has fewer connections for its weight than b. It counts the new
// connection too: otherwise an idle endpoint of weight 1 would equal an idle one of weight
// 100. An endpoint of weight 0 is never lighter.
func lighter(load Load, a, b *tracker.Endpoint) bool {
	return uint64(load(a.Addr)+1)*uint64(b.Weight) < uint64(load(b.Addr)+1)*uint64(a.Weight)
}

// RoundRobin chooses the endpoints in turn, in the order of the pool. It ignores weights
// except 0. The zero value is ready for use.
type RoundRobin struct {
	mu sync.Mutex
	// last is the last choice, and at its index in its pool.
	last netip.AddrPort
	at   int
}

// Pick implements [Balancer]. It returns the endpoint after the last choice, or the next by
// address if the last choice is no longer in the pool. It takes time proportional to the
// size of the pool only if the pool changed.
func (b *RoundRobin) Pick(pool []*tracker.Endpoint, _ netip.AddrPort) *tracker.Endpoint {
	b.mu.Lock()
	defer b.mu.Unlock()
	next := b.next(pool)
	for i := range pool {
		at := (next + i) % len(pool)
		if ep := pool[at]; ep.Weight > 0 {
			b.last, b.at = ep.Addr, at
			return ep
		}
	}
	return nil
}

// next returns the index to begin at, which may be len(pool).
func (b *RoundRobin) next(pool []*tracker.Endpoint) int {
	if !b.last.IsValid() {
		return 0
	}
	if b.at < len(pool) && pool[b.at].Addr == b.last {
		return b.at + 1
	}
	if i := slices.IndexFunc(pool, func(ep *tracker.Endpoint) bool { return ep.Addr == b.last }); i >= 0 {
		return i + 1
	}
	// The last choice is gone. Pools are sorted by address.
	return max(0, slices.IndexFunc(pool, func(ep *tracker.Endpoint) bool { return ep.Addr.Compare(b.last) > 0 }))
}

// LeastConnections chooses the endpoint with the fewest connections for its weight, and a
// random one of several equal endpoints. Load is required.
type LeastConnections struct {
	Load Load
}

// Pick implements [Balancer]. It takes time proportional to the size of the pool.
func (b *LeastConnections) Pick(pool []*tracker.Endpoint, _ netip.AddrPort) *tracker.Endpoint {
	var best *tracker.Endpoint
	same := 0
	for _, ep := range pool {
		switch {
		case ep.Weight == 0:
		case best == nil || lighter(b.Load, ep, best):
			best, same = ep, 1
		case !lighter(b.Load, best, ep):
			// The n-th of equal endpoints replaces the choice with a chance of 1/n, so
			// each is equally likely.
			if same++; rand.IntN(same) == 0 {
				best = ep
			}
		}
	}
	return best
}

// TwoChoices compares two random endpoints and chooses the one with fewer connections for
// its weight. It distributes connections nearly as evenly as [LeastConnections]
// (Mitzenmacher, "The Power of Two Choices in Randomized Load Balancing"), at a cost that
// does not depend on the size of the pool. Several proxies do not all choose the same idle
// endpoint. Load is required.
type TwoChoices struct {
	Load Load
}

// Pick implements [Balancer]. It takes time proportional to the size of the pool only if
// most endpoints have weight 0.
func (b *TwoChoices) Pick(pool []*tracker.Endpoint, _ netip.AddrPort) *tracker.Endpoint {
	one := random(pool, nil)
	if one == nil {
		return nil
	}
	if other := random(pool, one); other != nil && lighter(b.Load, other, one) {
		return other
	}
	return one
}

// random returns a random endpoint with a weight above 0 other than the given one, or nil.
func random(pool []*tracker.Endpoint, not *tracker.Endpoint) *tracker.Endpoint {
	if len(pool) == 0 {
		return nil
	}
	for range 4 {
		if ep := pool[rand.IntN(len(pool))]; ep.Weight > 0 && ep != not {
			return ep
		}
	}
	// Most endpoints cannot be chosen: check each.
	var found *tracker.Endpoint
	n := 0
	for _, ep := range pool {
		if ep.Weight > 0 && ep != not {
			if n++; rand.IntN(n) == 0 {
				found = ep
			}
		}
	}
	return found
}

// Algorithm identifies a type of [Balancer] by name, for flags and annotations. The zero
// value is weighted-round-robin.
type Algorithm uint8

// The algorithms.
const (
	// WeightedRoundRobinAlgorithm is [WeightedRoundRobin].
	WeightedRoundRobinAlgorithm Algorithm = iota
	// RoundRobinAlgorithm is [RoundRobin].
	RoundRobinAlgorithm
	// LeastConnectionsAlgorithm is [LeastConnections].
	LeastConnectionsAlgorithm
	// TwoChoicesAlgorithm is [TwoChoices].
	TwoChoicesAlgorithm
	// SourceHashAlgorithm is [SourceHash] with a Seed of 0.
	SourceHashAlgorithm
)

var names = [...]string{"weighted-round-robin", "round-robin", "least-connections", "two-choices", "source-hash"}

// ErrUnknown is wrapped by all errors of [Parse].
var ErrUnknown = errors.New("balance: unknown algorithm")

// Names returns the names that [Parse] accepts.
func Names() []string { return append([]string(nil), names[:]...) }

// Parse returns the algorithm with a name. Its error wraps [ErrUnknown] and lists the known
// names.
func Parse(name string) (Algorithm, error) {
	for i, n := range names {
		if n == name {
			return Algorithm(i), nil
		}
	}
	return 0, fmt.Errorf("%w %q, want one of %s", ErrUnknown, name, strings.Join(names[:], ", "))
}

// String returns the name that [Parse] accepts.
func (a Algorithm) String() string {
	if int(a) < len(names) {
		return names[a]
	}
	return "unknown"
}

// New returns a new Balancer. LeastConnections and TwoChoices use load; for the others it may
// be nil. An unknown value counts as 0.
func (a Algorithm) New(load Load) Balancer {
	switch a {
	case RoundRobinAlgorithm:
		return &RoundRobin{}
	case LeastConnectionsAlgorithm:
		return &LeastConnections{load}
	case TwoChoicesAlgorithm:
		return &TwoChoices{load}
	case SourceHashAlgorithm:
		return &SourceHash{}
	}
	return &WeightedRoundRobin{}
}
