// Package fake is a kernel with nf_tables in memory, for tests on every system. It applies the text of
// transactions, lists tables, and sends packets through their rules:
//
//	tables := fake.New()
//	err := tables.Load(tx.String()) // of an nftables.Transaction
//	got := tables.Handle(packet)    // what happens to a ruleset.Packet
//
// It is a simulator, not a mock: like the kernel, it applies a text as a whole or not at all, and refuses
// what refers to missing objects, elements that exist, and sets that are too small. Rules are interpreted as
// they are written. It knows the syntax that package nftables uses, with a command, definition, rule or
// element on a line. The tests of package nftables run its Backend against this kernel and Linux's, and compare both.
package fake

import (
	"fmt"
	"sync"

	"github.com/go-proxier/proxier/nftables/internal/memory"
	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/ruleset/conformance"
)

// Tables holds tables of all families. [New] makes one. Its methods may be called concurrently.
type Tables struct {
	mu     sync.Mutex
	kernel memory.Kernel
}

// New returns a kernel without tables.
func New() *Tables { return &Tables{} }

// Load applies a text as "nft -f" does: as a whole or, if it returns an error, not at all. The error wraps
// a [syscall.Errno] if the kernel would refuse the text.
func (t *Tables) Load(text string) error {
	t.mu.Lock()
	defer t.mu.Unlock()
	if err := t.kernel.Load(text); err != nil {
		return fmt.Errorf("fake: %w", err)
	}
	return nil
}

// List returns the tables as nft lists them: sets and then chains in the order of their creation, and
// elements in the order of their text.
func (t *Tables) List() string {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.kernel.List()
}

// Handle returns what the tables do with the first packet of a connection of a client that is not
// remembered: all ways that random choices and hashes may take. The packet is from the node if it has no
// interface.
func (t *Tables) Handle(p ruleset.Packet) conformance.Outcome {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.kernel.Handle(p)
}
