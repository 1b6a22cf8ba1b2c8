// Package balance chooses endpoints for connections: the load balancers of a
// proxy in userspace, each a small type behind one method.
//
//	b := &balance.WeightedRoundRobin{}
//	ep := b.Pick(pool, client)
//
// Each call of a [Balancer] gets the pool of endpoints. A pool may differ in each call, and
// a caller can leave out endpoints that failed. A Balancer keeps its state by address, with
// memory proportional to the largest pool.
//
// All Balancers honor [tracker.Endpoint.Weight] as far as their method allows. None chooses
// an endpoint of weight 0, which takes no new connections. All are safe for concurrent use.
//
// [Affinity] sends a client to its earlier endpoint, whatever Balancer chose it:
//
//	sticky := balance.NewAffinity(3 * time.Hour, 0)
//	b := sticky.Wrap(&balance.LeastConnections{Load: load})
//
// [Maglev] makes the same choice as package nftables for a Service with a hash ([tracker.ServicePort.Hash]).
package balance
