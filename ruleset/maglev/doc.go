// Package maglev makes look-up tables for consistent hashing, as section 3.4 of
// the Maglev paper describes them (Eisenbud et al., NSDI 2016): endpoints take
// turns in choosing a slot, each by an order of its own. The orders are drawn
// otherwise than there, because with an offset and a step alone two endpoints may
// follow each other through the table, which of three slots in a hundred moved
// makes up to sixty.
//
//	t := maglev.Build(seed, maglev.SizeFor(len(members)), members)
//	to := members[t.Find(maglev.HashAddrPort(seed, client))]
//
// A connection's hash picks a slot of the table, and the slot holds an endpoint.
// The table follows from nothing but the endpoints' addresses and weights, a seed
// and the table's size: not from the order they are given in, nor from what was
// there before, nor from the machine. So nodes that know the same endpoints choose
// alike, without talking to each other and after a restart. The hash is the one
// that the kernel's nf_tables make. For a [ruleset.Service] all of this is put
// together by its methods Maglev and HashOf.
//
// # Shares
//
// Endpoints of equal weight have equally many slots, give or take one. With
// weights, each has as many as its share of the sum comes to, give or take two, and
// none has no slot at all while there are enough slots.
//
// # What moves
//
// When an endpoint comes or goes, few slots change hands between the others. Where
// the hash is even, as few connections move. The share of slots that change hands
// when one of N endpoints goes, in per cent, on average over which one and over ten
// seeds, and at the most:
//
//	slots     N = 3         N = 10        N = 100
//	  251   34.5 (35.9)   15.2 (17.5)   4.4 (8.4)
//	  509   34.1 (34.8)   13.7 (15.3)   4.3 (6.3)
//	 1021   34.0 (34.7)   12.5 (13.7)   4.6 (5.6)
//	 4093   33.6 (33.9)   11.2 (11.7)   4.0 (4.5)
//	16381   33.5 (33.6)   10.6 (10.8)   2.3 (2.6)
//	65521   33.4 (33.5)   10.3 (10.4)   1.6 (1.7)
//	must    33.3          10             1
//
// (go test -run TestDisruption -v ./ruleset/maglev.) One that comes to N - 1 others
// is the same the other way round. With the sizes that [SizeFor] suggests it is five
// in a hundred beyond 1/N at the most on average, and seven in the worst case. A
// weight that changes moves what the endpoint has to get or give, and up to four in
// a hundred more.
//
// Another size is another table: nearly all connections move. SizeFor has few sizes
// for that reason. Where the number of endpoints goes up and down past one of its
// steps, as in a rollout with one or two more at a time, fix the size.
//
// A table is built in a few steps a slot: 7 us for 10 endpoints in 251 slots, 30 us
// in 1,021, 0.2 ms for 100 in 4,093, 4 ms in 65,521. Building it anew is cheaper
// than to remember how to change it, and comparing it with the one before tells what
// moved.
//
// [ruleset.Service]: https://pkg.go.dev/github.com/go-proxier/proxier/ruleset#Service
package maglev
