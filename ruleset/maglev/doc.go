// Package maglev builds look-up tables for consistent hashing. Nodes with the same endpoints choose the same endpoint for
// a connection, without communication and after a restart.
//
//	t := maglev.Build(seed, maglev.SizeFor(len(members)), members)
//	to := members[t.Find(maglev.HashAddrPort(seed, client))]
//
// A connection's hash selects a bucket of the table, and the bucket holds an endpoint. The table depends only on the
// addresses and weights of the endpoints, the seed and the size. The hash equals that of the kernel's nf_tables. The
// methods Maglev and HashOf of a [ruleset.Port] combine these functions.
//
// The tables follow section 3.4 of the Maglev paper (Eisenbud et al., NSDI 2016), with a permutation for each endpoint in
// place of an offset and a step, so that a removal moves fewer buckets.
//
// Endpoints of equal weight have the same number of buckets, give or take one. With different weights, each has its
// proportion, give or take two, and at least one bucket while there are enough.
//
// # Stability
//
// If one of N endpoints is removed, its share of the buckets, 1/N, must move. With the sizes that [SizeFor] returns, at
// most five per cent of the buckets move in addition on average over the endpoints, and seven per cent in the worst case
// (TestRemovedMemberMovesFewBuckets). Adding an endpoint moves as many. A changed weight moves the difference in the
// endpoint's share and up to four per cent more. A table of another size moves nearly all connections: use a fixed size
// if the number of endpoints often crosses a limit of SizeFor.
//
// [ruleset.Port]: https://pkg.go.dev/github.com/go-proxier/proxier/ruleset#Port
package maglev
