package balance

import (
	"math/rand/v2"
	"net/netip"

	"github.com/go-proxier/proxier/tracker"
)

// LeastConnections chooses the endpoint with the fewest connections for its
// weight, any one of several. Load is required.
type LeastConnections struct {
	Load Load
}

// Pick takes a step for each endpoint.
func (b *LeastConnections) Pick(pool []*tracker.Endpoint, _ netip.AddrPort) *tracker.Endpoint {
	var best *tracker.Endpoint
	same := 0
	for _, ep := range pool {
		switch {
		case ep.Weight == 0:
		case best == nil || lighter(b.Load, ep, best):
			best, same = ep, 1
		case !lighter(b.Load, best, ep):
			// The n-th of equals replaces the one before with a chance of 1/n: each
			// is as likely in the end.
			if same++; rand.IntN(same) == 0 {
				best = ep
			}
		}
	}
	return best
}
