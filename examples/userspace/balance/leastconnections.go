package balance

import (
	"math/rand/v2"
	"net/netip"

	"github.com/go-proxier/proxier/tracker"
)

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
