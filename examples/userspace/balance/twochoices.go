package balance

import (
	"math/rand/v2"
	"net/netip"

	"github.com/go-proxier/proxier/tracker"
)

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
