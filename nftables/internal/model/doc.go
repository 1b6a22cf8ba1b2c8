// Package model holds what the tables in the kernel contain, and plans how they change. It does
// no I/O and builds on every system.
//
// A [Table] is the model of one family's table. [Table.Change] adds the elements by which a
// Service changes to a [Tx], a transaction as a value. [Tables] turns a delta into transactions
// and passes them to a [Sink]: the kernel, or in tests a fake.
//
// A Table has departments: pools, chains, frontends, portRanges, hairpin, intervals, affinity and
// room. Each alone changes its fields and adds the elements of its sets. change.go calls one after
// the other for a Service. The departments note the changes of a plan in the table's draft,
// which is kept if the whole plan succeeds and dropped otherwise. Elements are counted when they are sent.
package model
