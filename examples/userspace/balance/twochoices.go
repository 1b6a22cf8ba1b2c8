package balance

import (
	"math/rand/v2"
	"net/netip"

	"github.com/go-proxier/proxier/tracker"
)

// TwoChoices looks at two endpoints at random and chooses the one with fewer
// connections for its weight. That is nearly as even as [LeastConnections]
// (Mitzenmacher, "The Power of Two Choices in Randomized Load Balancing"), at a
// cost that does not grow with the pool, and several proxies that do so side by
// side do not all rush to the same idle endpoint. Load is required.
type TwoChoices struct {
	Load Load
}

// Pick takes a few steps, and one for each endpoint if most have no weight.
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

// random returns an endpoint with a weight that is not the given one, nil if
// there is none.
func random(pool []*tracker.Endpoint, not *tracker.Endpoint) *tracker.Endpoint {
	if len(pool) == 0 {
		return nil
	}
	for range 4 {
		if ep := pool[rand.IntN(len(pool))]; ep.Weight > 0 && ep != not {
			return ep
		}
	}
	// Most are none to choose: have a look at each.
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
