package balance

import (
	"net/netip"

	"github.com/go-proxier/proxier/tracker"
)

// Balancer chooses endpoints for the connections to one Service port.
//
// Pick returns one of pool for a new connection from client, or nil if none has a
// weight. It neither keeps nor changes pool, whose endpoints must not be nil and
// have different addresses. It is safe for concurrent use.
type Balancer interface {
	Pick(pool []*tracker.Endpoint, client netip.AddrPort) *tracker.Endpoint
}

// Load returns how many connections an endpoint has now. It is called by Pick, for
// many endpoints in turn, and must be safe for concurrent use.
type Load func(netip.AddrPort) int

// lighter reports whether a has less to do than b for its weight, counting the
// connection that is to come: without it an idle endpoint of weight 1 would be as
// light as an idle one of weight 100. A weight of 0 is infinitely heavy.
func lighter(load Load, a, b *tracker.Endpoint) bool {
	return uint64(load(a.Addr)+1)*uint64(b.Weight) < uint64(load(b.Addr)+1)*uint64(a.Weight)
}
