package nftables

import (
	"errors"
	"syscall"
	"testing"

	"github.com/go-proxier/proxier/internal/nft"
	"github.com/go-proxier/proxier/nftables/internal/layout"
	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/ruleset/dataplane"
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

// TestCheckDetectsChangesInMemory alters the tables in every way that Check detects. The next full
// delta must repair them, also if a new process applies it.
func TestCheckDetectsChangesInMemory(t *testing.T) {
	t.Parallel()
	first := func(s *memorySet) string {
		for key := range s.elements {
			return key
		}
		panic("the set is empty")
	}
	deleteElement := func(s layout.Set) func(*memory, *memoryTable) {
		return func(_ *memory, t *memoryTable) { delete(t.elements(s), first(t.sets[s.Name()])) }
	}
	deleteChain := func(name string) func(*memory, *memoryTable) {
		return func(_ *memory, t *memoryTable) { delete(t.chains, name) }
	}
	for name, alter := range map[string]func(*memory, *memoryTable){
		"the table is deleted":   func(m *memory, _ *memoryTable) { delete(m.tables, tableID{DefaultTable, tracker.IPv4}) },
		"all tables are deleted": func(m *memory, _ *memoryTable) { clear(m.tables) },
		"the table is dormant":   func(_ *memory, t *memoryTable) { t.Flags = 1 },
		"a chain is flushed":     func(_ *memory, t *memoryTable) { t.chains[layout.ChainServices].rules = nil },
		"a rule is replaced":     func(m *memory, t *memoryTable) { t.chains[layout.ChainServices].rules[0].handle = m.handle() },
		"a rule is altered":      func(_ *memory, t *memoryTable) { t.chains[layout.ChainServices].rules[0].sum++ },
		"a rule is added": func(m *memory, t *memoryTable) {
			c := t.chains[layout.ChainNATPrerouting]
			c.rules = append(c.rules, memoryRule{handle: m.handle()})
		},
		"a base chain is deleted":       deleteChain(layout.ChainNATPostrouting),
		"a base chain has another hook": func(_ *memory, t *memoryTable) { t.chains[layout.ChainNATOutput].base = &nft.BaseChain{Hook: 9} },
		"a chain is added":              func(_ *memory, t *memoryTable) { t.chains["strange"] = &memoryChain{name: "strange"} },
		"a handler's chain is deleted":  deleteChain("pool-2"),
		"a set is deleted":              func(_ *memory, t *memoryTable) { delete(t.sets, layout.Endpoints.Name()) },
		"a set has other attributes":    func(_ *memory, t *memoryTable) { t.sets[layout.Endpoints.Name()].KeyLen++ },
		"a set is added":                func(_ *memory, t *memoryTable) { t.sets["strange"] = &memorySet{} },
		"a flowtable is added":          func(_ *memory, t *memoryTable) { t.flowtables["strange"] = map[string]bool{} },
		"a handler is missing":          deleteElement(layout.Handlers),
		"a frontend is missing":         deleteElement(layout.ServiceIPs),
		"an endpoint is missing":        deleteElement(layout.Endpoints),
		"a sticky endpoint is missing":  deleteElement(layout.StickyEndpoints),
		"an interval is missing":        func(_ *memory, t *memoryTable) { clear(t.elements(layout.ServiceCIDRs)) },
		"a handler leads elsewhere":     func(_ *memory, t *memoryTable) { redirect(t.elements(layout.Handlers)) },
		"another version wrote the table": func(_ *memory, t *memoryTable) {
			clear(t.elements(layout.VersionSet))
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			r := newAlteredRig(t)
			for round := range 2 {
				r.memory.alter(tracker.IPv4, func(t *memoryTable) { alter(r.memory, t) })
				var drift *dataplane.DriftError
				if err := r.backend.Check(t.Context()); !errors.As(err, &drift) || !errors.Is(err, ruleset.ErrNeedFull) {
					t.Fatalf("Check returned %v", err)
				}
				if round == 1 {
					r.start()
				}
				r.cursor.Resync()
				r.sync()
				r.verify()
			}
		})
	}
}

// redirect makes all elements of a verdict map lead to one chain.
func redirect(elements map[string]nft.Element) {
	chain := ""
	for key, e := range elements {
		if chain == "" {
			chain = e.Chain
		}
		e.Chain = chain
		elements[key] = e
	}
}

// TestForeignTransactionIsNoDriftInMemory commits a transaction that does not concern the tables.
func TestForeignTransactionIsNoDriftInMemory(t *testing.T) {
	t.Parallel()
	r := newAlteredRig(t)
	r.memory.alter(tracker.IPv4, func(*memoryTable) {})
	if err := r.backend.Check(t.Context()); err != nil {
		t.Errorf("Check returned %v", err)
	}
	r.memory.interrupted = 1000
	r.memory.alter(tracker.IPv4, func(t *memoryTable) { clear(t.chains) })
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
		alter func(*memoryTable)
		want  syscall.Errno
	}{
		"an element is missing": {func(t *memoryTable) { clear(t.elements(layout.Endpoints)) }, syscall.ENOENT},
		"an element exists": {func(t *memoryTable) {
			set := t.elements(layout.Endpoints)
			for pool := range uint32(4) {
				key := string(append(word(pool), word(2)...))
				set[key] = nft.Element{Key: []byte(key), Data: make([]byte, 8)}
			}
		}, syscall.EEXIST},
		"a set is missing": {func(t *memoryTable) { delete(t.sets, layout.Endpoints.Name()) }, syscall.ENOENT},
		"a set is full":    {func(t *memoryTable) { t.sets[layout.Endpoints.Name()].Size = 2 }, syscall.ENFILE},
	} {
		t.Run(name, func(t *testing.T) {
			r := newAlteredRig(t)
			r.memory.alter(tracker.IPv4, c.alter)
			before := r.memory.describe()
			r.tracker.SetSlice(epSlice(0, tracker.IPv4, 2, 3, 4))
			r.applied = func(err error) {
				if !errors.Is(err, ruleset.ErrNeedFull) || !errors.Is(err, c.want) {
					t.Errorf("Apply returned %v, want %v", err, c.want)
				}
				if after := r.memory.describe(); after != before {
					t.Errorf("a refused transaction had an effect:\n%s", after)
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
