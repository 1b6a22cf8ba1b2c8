package balance

import (
	"net/netip"
	"slices"
	"sync"

	"github.com/go-proxier/proxier/tracker"
)

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
