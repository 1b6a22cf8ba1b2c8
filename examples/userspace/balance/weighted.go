package balance

import (
	"net/netip"
	"sync"

	"github.com/go-proxier/proxier/tracker"
)

// WeightedRoundRobin chooses each endpoint as often as its weight says, as evenly
// spread as possible: of weights 5, 1 and 1 the first is chosen in A A B A C A A,
// not five times in a row. This is the "smooth" method of nginx. With equal
// weights it is round robin. The zero value is ready for use.
type WeightedRoundRobin struct {
	mu sync.Mutex
	// credit is what each endpoint is owed: it grows by its weight with each pick,
	// and who has most is chosen and pays for all.
	credit map[netip.AddrPort]int64
}

// Pick returns the endpoint that is owed most, the first of several. It takes a
// step for each endpoint.
func (b *WeightedRoundRobin) Pick(pool []*tracker.Endpoint, _ netip.AddrPort) *tracker.Endpoint {
	b.mu.Lock()
	defer b.mu.Unlock()
	if len(b.credit) > len(pool)+len(pool)/2+16 {
		b.forget(pool)
	}
	if b.credit == nil {
		b.credit = make(map[netip.AddrPort]int64, len(pool))
	}
	var total int64
	for _, ep := range pool {
		total += int64(ep.Weight)
	}
	var best *tracker.Endpoint
	var most int64
	for _, ep := range pool {
		w := int64(ep.Weight)
		if w == 0 {
			continue
		}
		// What is owed from when weights were larger would take long to pay.
		has := max(-total, min(b.credit[ep.Addr], total)) + w
		b.credit[ep.Addr] = has
		if best == nil || has > most {
			best, most = ep, has
		}
	}
	if best != nil {
		b.credit[best.Addr] = most - total
	}
	return best
}

// forget drops the endpoints that are not in the pool.
func (b *WeightedRoundRobin) forget(pool []*tracker.Endpoint) {
	kept := make(map[netip.AddrPort]int64, len(pool))
	for _, ep := range pool {
		if c, ok := b.credit[ep.Addr]; ok {
			kept[ep.Addr] = c
		}
	}
	b.credit = kept
}
