// Package model holds what the tables in the kernel contain, and plans how they change. It does
// no I/O and builds on every system.
//
// A [Table] is the model of one family's table. [Table.Change] adds the elements by which a
// Service changes to a [Tx], a transaction as a value. [Tables] turns a delta into transactions
// and passes them to a [Sink]: the kernel, or in tests a fake.
//
// wanted.go compiles a version of a Service into plain values without numbers. A Table has departments (pools,
// chains, frontends, hairpin, intervals, affinity, room), each of which owns its fields and sets. change.go calls one
// after the other with the old and the new version. Elements are counted when they are sent.
package model
