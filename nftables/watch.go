package nftables

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"maps"
	"slices"
	"syscall"
	"time"

	"github.com/go-proxier/proxier/internal/nfnl"
	"github.com/go-proxier/proxier/internal/nft"
	"github.com/go-proxier/proxier/nftables/internal/layout"
	"github.com/go-proxier/proxier/nftables/internal/model"
	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/ruleset/dataplane"
	"github.com/go-proxier/proxier/tracker"
)

// watched is the result of the last examination of the tables in the kernel.
type watched struct {
	// generation is the network namespace's generation when the tables were last in their proper state, and commits
	// the number of transactions that this backend had committed then.
	generation, commits uint32
	// rules holds the rules of each table by handle. It is nil before the first examination.
	rules []map[uint64]nft.Rule
}

// Check compares the tables with what the backend wrote. It returns a [*dataplane.DriftError] if another process
// altered or deleted a table, and an error that wraps [ruleset.ErrNeedFull] alone if the tables' state is unknown
// after a failure. Before the first full delta it returns nil. Other errors are ctx's, wrap [os.ErrClosed], or are
// about reading the tables. After any error but ctx's, the next delta must be a full one, and [Backend.Apply] returns
// [ruleset.ErrNeedFull] for any other.
//
// While no other process commits transactions in the network namespace, Check makes one small request. Otherwise it
// reads the chains, rules, sets and small maps, and the numbers of elements of the large maps, whose elements only a
// full delta repairs. It compares numbers of elements if the kernel reports them (Linux 6.16) or there are at most
// 20,000. If other processes commit so fast that they interrupt every read, Check returns nil.
func (b *Backend) Check(ctx context.Context) error {
	if err := b.lock(ctx); err != nil {
		return err
	}
	defer b.mu.Unlock()
	switch {
	case !b.started:
		return nil
	case b.tables == nil:
		return fmt.Errorf("nftables: %w: the state of the tables is unknown", ruleset.ErrNeedFull)
	}
	if b.staleInterfaces {
		// With ENOENT, interfaces are deleted faster than they can be listed. If a table is missing, the generation
		// has changed.
		if err := b.syncInterfaces(); err != nil && !errors.Is(err, syscall.ENOENT) {
			b.discard(time.Now())
			return err
		}
	}
	// The next call examines later commits.
	gen, err := b.conn.Generation()
	if err == nil && gen == b.watched.generation+b.conn.Commits()-b.watched.commits {
		return nil
	}
	if err == nil {
		err = b.examine(true)
	}
	switch {
	case errors.Is(err, nfnl.ErrInterrupted):
		b.config.Log.Info("nftables: cannot check tables, transactions of other processes interrupt every read")
		return nil
	case err != nil:
		b.discard(time.Now())
		return err
	}
	b.watched.generation, b.watched.commits = gen, b.conn.Commits()
	return nil
}

// drifted returns a [*dataplane.DriftError] about a family's table.
func drifted(f tracker.Family, format string, args ...any) error {
	return &dataplane.DriftError{Backend: "nftables", Family: f, What: fmt.Sprintf(format, args...)}
}

// Watch calls [Backend.Check] after transactions that any process commits in the network namespace, at most once an
// interval, and every minute otherwise, until ctx is done or the backend is closed. It calls drifted with the errors
// of Check, and returns ctx's error or one that wraps [os.ErrClosed]. drifted should make the cursor resync. Without
// the kernel's notifications, Watch calls Check at the interval.
//
// With Config.Offload, Watch also adds new network interfaces that Offload.Interfaces chooses to the fast path, and
// removes others from it, at its start and whenever an interface is created, deleted or renamed, on a goroutine that
// ends before Watch returns. It calls drifted with the errors of that, too. Calls of drifted never overlap.
func (b *Backend) Watch(ctx context.Context, interval time.Duration, drifted func(error)) error {
	drifted, stop, err := b.followInterfaces(ctx, drifted)
	if err != nil {
		return err
	}
	defer stop()
	open, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	defer context.AfterFunc(b.open, func() { cancel(errClosed) })()
	err = b.conn.WatchCommits(open, interval, b.Check, drifted)
	if ctx.Err() != nil {
		return ctx.Err()
	}
	return err
}

// examine reads the tables, compares them with their models, and stores their rules. With count it also compares
// numbers of elements. The caller must read the generation before.
func (b *Backend) examine(count bool) error {
	if b.watched.rules == nil {
		b.watched.rules = make([]map[uint64]nft.Rule, len(b.tables.List))
	}
	for i, t := range b.tables.List {
		rules, err := b.examineTable(t, b.watched.rules[i], count)
		var drift *dataplane.DriftError
		switch {
		case errors.As(err, &drift):
			return drift
		case errors.Is(err, syscall.ENOENT):
			return drifted(t.Family, "the table or one of its sets is missing")
		case err != nil:
			return fmt.Errorf("nftables: cannot check tables: %w", err)
		}
		b.watched.rules[i] = rules
	}
	return nil
}

// examineTable compares each chain's rule count with the table's model and checks that the rules seen last time still
// exist. It returns the current rules.
func (b *Backend) examineTable(t *model.Table, last map[uint64]nft.Rule, count bool) (map[uint64]nft.Rule, error) {
	drift := func(format string, args ...any) (map[uint64]nft.Rule, error) {
		return nil, drifted(t.Family, format, args...)
	}
	head, err := b.conn.Table(b.name, t.Family)
	switch {
	case err != nil:
		return nil, err
	case !head.Exists:
		return drift("the table is missing")
	case head.Flags != 0:
		return drift("the table has flags %#x", head.Flags)
	}
	sets, err := b.conn.Sets(b.name, t.Family)
	if err != nil {
		return nil, err
	}
	for s := range layout.SetCount {
		if !t.Has(s) {
			continue
		}
		found, ok := sets[s.Name()]
		if !ok || !found.Is(s.Spec(t.Family)) {
			return drift("set %s is missing or has other attributes", s.Name())
		}
		delete(sets, s.Name())
		if count {
			if err := b.compareCount(t, s, found.Count); err != nil {
				return nil, err
			}
		}
	}
	for name := range sets {
		return drift("unexpected set %s", name)
	}
	chains, err := b.conn.Chains(b.name, t.Family)
	if err != nil {
		return nil, err
	}
	base, expected := b.expectedChains(t)
	for name := range expected {
		if c, ok := chains[name]; !ok || !c.Is(base[name]) {
			return drift("chain %s is missing or has another hook or policy", name)
		}
		delete(chains, name)
	}
	for name, c := range chains {
		if !b.unused[t.Family][name] || c.Base != nil {
			return drift("unexpected chain %s", name)
		}
	}
	list, err := b.conn.Rules(b.name, t.Family)
	if err != nil {
		return nil, err
	}
	found := make(map[uint64]nft.Rule, len(list))
	for _, r := range list {
		found[r.Handle] = r
		expected[r.Chain]--
	}
	for name, missing := range expected {
		if missing != 0 {
			return drift("chain %s has an unexpected number of rules (%+d)", name, -missing)
		}
	}
	for handle, r := range last {
		if found[handle] != r {
			return drift("a rule of chain %s was replaced", r.Chain)
		}
	}
	if err := b.compareFlowtables(t); err != nil {
		return nil, err
	}
	return found, b.compareMaps(t)
}

// expectedChains returns the hooks of base chains, and the number of rules that each chain must have.
func (b *Backend) expectedChains(t *model.Table) (base map[string]*nft.BaseChain, rules map[string]int) {
	objects := []model.Object{{Kind: model.FixedChains}, {Kind: model.BaseChains}}
	objects = slices.AppendSeq(objects, maps.Values(t.Chains.Objects()))
	base, rules = b.config.rules(t.Family, t.Node()).Outline(objects)
	rules[layout.ChainFirewallCheck] += t.Frontends.Sources()
	return base, rules
}

// compareMaps compares the contents of the verdict maps and the interval sets.
func (b *Backend) compareMaps(t *model.Table) error {
	for s, want := range t.Chains.Verdicts() {
		if !t.Has(s) {
			continue
		}
		found := map[uint32]string{}
		err := readAll(b.conn, b.name, t.Family, s, func() { clear(found) }, func(e nft.Element) {
			if len(e.Key) == 4 && e.Goto {
				found[binary.NativeEndian.Uint32(e.Key)] = e.Chain
			} else {
				found[0] = "" // no handler has the key 0, so the maps differ
			}
		})
		if err != nil {
			return err
		}
		if !maps.Equal(found, want) {
			return drifted(t.Family, "map %s has other elements", s.Name())
		}
	}
	for _, s := range intervalSets {
		found, err := b.readRanges(b.name, t.Family, s)
		if err != nil {
			return err
		}
		if !slices.Equal(found, t.Intervals.Ranges(s)) {
			return drifted(t.Family, "set %s has other elements: %v", s.Name(), found)
		}
	}
	return nil
}

// countable is the largest number of elements that are counted one by one.
const countable = 20000

// compareCount compares the number of a set's elements with count, which is -1 if the
// kernel does not report it.
func (b *Backend) compareCount(t *model.Table, s layout.Set, count int) error {
	if s == layout.StickyClients || s.Interval() || s.Counts() {
		return nil // packets change it, or compareMaps compares it
	}
	want := t.Room.Count(s)
	if count < 0 {
		if want > countable {
			return nil
		}
		err := readAll(b.conn, b.name, t.Family, s, func() { count = 0 }, func(nft.Element) { count++ })
		if err != nil {
			return err
		}
	}
	if count != want {
		return drifted(t.Family, "set %s has %d elements, want %d", s.Name(), count, want)
	}
	return nil
}
