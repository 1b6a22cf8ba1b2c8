// Package fake is a kernel with iptables in memory, for tests on every system. It applies inputs of iptables-restore,
// prints tables as iptables-save does, and sends packets through them:
//
//	tables := fake.New()
//	for _, in := range tx.Inputs(0) { // of an iptables.Transaction
//		err := tables.Restore(in.Text)
//	}
//	got := tables.Handle(packet) // what happens to a ruleset.Packet
//
// Like the programs, it applies each table of an input as a whole or not at all, and refuses options that it does not
// know, chains that do not exist, the deletion of chains that are in use, and rules that are not there. It knows the
// options that packages iptables and ipvs use. The tests of package iptables run its Backend with this kernel and Linux's.
package fake

import (
	"context"
	"strings"

	"github.com/go-proxier/proxier/internal/iptmemory"
	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/ruleset/conformance"
)

// Tables holds the tables of one family. [New] makes one. Its methods may be called concurrently.
type Tables struct{ kernel *iptmemory.Tables }

// New returns empty tables filter, nat and mangle.
func New() *Tables { return &Tables{iptmemory.New()} }

// Restore applies an input as iptables-restore --noflush does. The error says which line is refused, and why.
func (t *Tables) Restore(input string) error {
	return t.kernel.Restore(context.Background(), []byte(input))
}

// Save returns all tables as iptables-save prints them, with the rules as they were written.
func (t *Tables) Save() string {
	var out strings.Builder
	_ = t.kernel.Save(context.Background(), "", &out) // a Builder's error is nil
	return out.String()
}

// Handle returns what the tables do with the first packet of a connection: all ways that random
// choices may take. The packet is from the node if it has no interface.
func (t *Tables) Handle(p ruleset.Packet) conformance.Outcome { return t.kernel.Handle(p) }
