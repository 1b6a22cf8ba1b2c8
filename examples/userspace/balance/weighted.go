package balance

import (
	"net/netip"
	"sync"

	"github.com/go-proxier/proxier/tracker"
)

// WeightedRoundRobin chooses each endpoint in proportion to its weight, as evenly in time as
// possible: weights 5, 1 and 1 give the order A A B A C A A, not five times A in a row. This
// is the "smooth" method of nginx. With equal weights it is round robin. The zero value is
// ready for use.
type WeightedRoundRobin struct {
	mu sync.Mutex
	// credit is the balance of each endpoint. Each pick adds every endpoint's weight to its
	// credit, chooses the largest credit, and subtracts the sum of all weights from it.
	credit map[netip.AddrPort]int64
}

// Pick implements [Balancer]. It returns the first endpoint with the largest credit. It takes
// time proportional to the size of the pool.
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
		// Credit from a time of larger weights would take long to balance.
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

// forget removes the endpoints that are not in the pool.
func (b *WeightedRoundRobin) forget(pool []*tracker.Endpoint) {
	kept := make(map[netip.AddrPort]int64, len(pool))
	for _, ep := range pool {
		if c, ok := b.credit[ep.Addr]; ok {
			kept[ep.Addr] = c
		}
	}
	b.credit = kept
}
