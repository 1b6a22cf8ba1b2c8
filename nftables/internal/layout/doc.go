// Package layout defines what the tables in the kernel look like: the names and types of sets,
// the names of chains, and the encoding of keys and data. It does no I/O and builds on every
// system. DESIGN.md of package nftables shows a packet's way through the tables.
package layout
