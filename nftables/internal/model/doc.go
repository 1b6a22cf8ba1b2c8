// Package model holds what the tables in the kernel contain, and plans how they change. It does
// no I/O and builds on every system.
//
// A [Table] is the model of one family's table. [Table.Change] adds the elements by which a
// Service changes to a [Tx], a transaction as a value. [Tables] turns a delta into transactions
// and passes them to a [Sink]: the kernel, or in tests a fake.
//
// wanted.go compiles a version of a Service once, into plain values: its pools, its handlers and the
// elements of its frontends, without numbers. A Table has departments: pools, chains, frontends,
// hairpin, intervals, affinity and room. Each alone changes its fields and adds the elements
// of its sets. change.go calls one after the other with what a Service wanted before and what it wants
// now; they compare and add numbers. What a plan changes in them, they note in the table's draft, which
// is kept if the whole plan succeeds and dropped otherwise. Elements are counted when they are sent.
package model
