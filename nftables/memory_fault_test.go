package nftables

import (
	"errors"
	"slices"
	"syscall"
	"testing"

	"github.com/go-proxier/proxier/internal/nft"
	"github.com/go-proxier/proxier/nftables/internal/layout"
	"github.com/go-proxier/proxier/nftables/internal/memory"
	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/tracker"
)

// newAlteredRig returns a rig with Services of several kinds, whose tables a test alters.
func newAlteredRig(t *testing.T) *memoryRig {
	t.Helper()
	r := newMemoryRig(t)
	r.tracker.SetService(svc(0, nodePort(30000)))
	r.tracker.SetService(svc(1, sticky(600)))
	for i := range 2 {
		r.tracker.SetSlice(epSlice(i, tracker.IPv4, 1, 2))
		r.tracker.SetSlice(epSlice(i, tracker.IPv6, 1, 2))
	}
	r.sync()
	return r
}

// TestForeignTransactionIsNoDriftInMemory commits a transaction that does not concern the tables.
func TestForeignTransactionIsNoDriftInMemory(t *testing.T) {
	t.Parallel()
	r := newAlteredRig(t)
	r.memory.alter(tracker.IPv4, func(*memory.Table) {})
	if err := r.backend.Check(t.Context()); err != nil {
		t.Errorf("Check returned %v", err)
	}
	r.memory.interrupted = 1000
	r.memory.alter(tracker.IPv4, func(t *memory.Table) { clear(t.Chains) })
	if err := r.backend.Check(t.Context()); err != nil {
		t.Errorf("Check returned %v while every read is interrupted", err)
	}
	r.memory.interrupted = 1
	if err := r.backend.Check(t.Context()); !errors.Is(err, ruleset.ErrNeedFull) {
		t.Errorf("Check returned %v", err)
	}
}

// TestRefusedChangeRequiresFullDelta alters the tables in ways that a transaction meets. The refused
// transaction must have no effect.
func TestRefusedChangeRequiresFullDelta(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		alter func(*memory.Table)
		want  syscall.Errno
	}{
		"an element is missing": {func(t *memory.Table) { clear(elementsIn(t, layout.Endpoints)) }, syscall.ENOENT},
		"an element exists": {func(t *memory.Table) {
			set := elementsIn(t, layout.Endpoints)
			for pool := range uint32(4) {
				key := string(append(word(pool), word(2)...))
				set[key] = nft.Element{Key: []byte(key), Data: make([]byte, 8)}
			}
		}, syscall.EEXIST},
		"a set is missing": {func(t *memory.Table) { delete(t.Sets, layout.Endpoints.Name()) }, syscall.ENOENT},
		"a set is full":    {func(t *memory.Table) { t.Sets[layout.Endpoints.Name()].Size = 2 }, syscall.ENFILE},
	} {
		t.Run(name, func(t *testing.T) {
			r := newAlteredRig(t)
			r.memory.alter(tracker.IPv4, c.alter)
			before := contents(t, r.backend.conn, r.backend.name, tracker.IPv4)
			r.tracker.SetSlice(epSlice(0, tracker.IPv4, 2, 3, 4))
			r.applied = func(err error) {
				if !errors.Is(err, ruleset.ErrNeedFull) || !errors.Is(err, c.want) {
					t.Errorf("Apply returned %v, want %v", err, c.want)
				}
				if after := contents(t, r.backend.conn, r.backend.name, tracker.IPv4); !slices.Equal(after, before) {
					t.Errorf("a refused transaction had an effect:\n%s", without(after, before))
				}
				r.applied = nil
			}
			r.sync()
			if len(r.memory.refusals) != 1 || r.full != 2 {
				t.Errorf("%d refusals and %d full deltas, want 1 and 2", len(r.memory.refusals), r.full)
			}
			r.verify()
		})
	}
}
