// Package balance chooses endpoints for connections: the load balancers of a
// proxy in userspace, each a small type behind one method.
//
//	b := &balance.WeightedRoundRobin{}
//	ep := b.Pick(pool, client)
//
// A [Balancer] is given the endpoints to choose among each time, so it need not
// be told when they change, and a caller may leave out those that it has tried in
// vain. What it remembers between picks is kept by address and costs no more
// than the largest pool.
//
// All of them honour [tracker.Endpoint.Weight] as far as the method allows, and
// none chooses an endpoint of weight 0: that one takes no new connections. They
// may be used by any number of goroutines.
//
// [Affinity] sends a client where it was sent before, whatever Balancer chose
// that:
//
//	sticky := balance.NewAffinity(3 * time.Hour, 0)
//	b := sticky.Wrap(&balance.LeastConnections{Load: load})
//
// [Maglev] makes the choice that every data plane makes for a Service with a hash
// ([tracker.ServicePort.Hash]), the kernel's by package nftables included.
//
// An [Algorithm] is one of them by the name that a flag or an annotation has.
package balance
