package balance

import (
	"net/netip"

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
