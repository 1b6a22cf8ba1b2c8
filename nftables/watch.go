//go:build linux

package nftables

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"maps"
	"slices"
	"time"

	"golang.org/x/sys/unix"

	"github.com/go-proxier/proxier/internal/nfnl"
	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/tracker"
)

// watched is what is known of the tables in the kernel since they were last read.
type watched struct {
	// generation is the network namespace's when the tables were last known to be
	// right, and commits how many transactions this backend had made by then.
	generation, commits uint32
	// rules is the rules of each table, by handle: nil before they were first read.
	rules []map[uint64]kernelRule
}

// Check compares the tables with what the backend wrote. It returns nil, a
// [*ruleset.DriftError] if another process altered or deleted a table or if the tables'
// state is unknown after a failure, [os.ErrClosed], ctx's error, or the error of reading
// the tables. After any error but ctx's the next delta must be a full one;
// [Backend.Apply] asks for it.
//
// While nobody else commits transactions in the network namespace it costs one
// question to the kernel. Otherwise chains, rules, sets, the small maps and the
// number of elements of the large ones are read, but not what those hold: a full
// delta at long intervals sets that right, too. Numbers of elements are compared
// where the kernel tells them (Linux 6.16) or there are at most 20,000. Where
// others commit so fast that nothing can be read in between, nothing is decided:
// Check returns nil, and the next call tries again.
func (b *Backend) Check(ctx context.Context) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.conn.Closed() {
		return errClosed
	}
	if b.tables == nil {
		return drifted(b.config.Families[0], "the state of the tables is unknown: no full delta was applied since the last failure")
	}
	// What is committed from here on is looked at by the next call.
	gen, err := b.conn.Generation()
	if err == nil && gen == b.watched.generation+b.conn.Commits()-b.watched.commits {
		return nil
	}
	if err == nil {
		err = b.examine(true)
	}
	switch {
	case errors.Is(err, nfnl.ErrInterrupted):
		b.config.Log.Info("nftables: tables not checked, too much else is being committed")
		return nil
	case err != nil:
		b.discardModel(time.Now())
		return err
	}
	b.watched.generation, b.watched.commits = gen, b.conn.Commits()
	return nil
}

// drifted says how a family's table differs from how the backend left it.
func drifted(f tracker.Family, format string, args ...any) error {
	return &ruleset.DriftError{Backend: "nftables", Family: f, What: fmt.Sprintf(format, args...)}
}

// Watch is [ruleset.Watch] with [Backend.Check]: it calls drifted with what that
// finds, until ctx is done or the backend is closed; it returns ctx's error or
// [os.ErrClosed]. What drifted should do is ask the cursor for a full delta and have
// it synced.
func (b *Backend) Watch(ctx context.Context, interval time.Duration, drifted func(error)) error {
	return ruleset.Watch(ctx, interval, b.Check, drifted)
}

// examine reads the tables, compares them with what they are made of, and
// remembers their rules. With count it compares numbers of elements, too. It says
// nothing of the generation: whoever calls it must know what it was before.
func (b *Backend) examine(count bool) error {
	if b.watched.rules == nil {
		b.watched.rules = make([]map[uint64]kernelRule, len(b.tables))
	}
	for i, t := range b.tables {
		rules, err := b.examineTable(t, b.watched.rules[i], count)
		var drift *ruleset.DriftError
		switch {
		case errors.As(err, &drift):
			return drift
		case errors.Is(err, unix.ENOENT):
			return drifted(t.family, "it or one of its sets is gone")
		case err != nil:
			return fmt.Errorf("nftables: check: %w", err)
		}
		b.watched.rules[i] = rules
	}
	return nil
}

// examineTable compares a table with what it is made of. Of rules it knows how
// many there must be in each chain, and that those of before, known by then, must
// still be there; it returns those of now.
func (b *Backend) examineTable(t *table, before map[uint64]kernelRule, count bool) (map[uint64]kernelRule, error) {
	drift := func(format string, args ...any) (map[uint64]kernelRule, error) {
		return nil, drifted(t.family, format, args...)
	}
	head, err := readTable(b.conn, b.name, t.family)
	switch {
	case err != nil:
		return nil, err
	case !head.exists:
		return drift("it is gone")
	case head.flags != 0:
		return drift("it has flags %#x", head.flags)
	}
	sets, err := b.readSets(b.name, t.family)
	if err != nil {
		return nil, err
	}
	for s := range setCount {
		if s >= firstAllowed && !t.prefixes[int(s-firstAllowed)] {
			continue
		}
		found, ok := sets[s.name()]
		if !ok || !found.is(s.spec(t.family)) {
			return drift("%s is gone or another", s.name())
		}
		delete(sets, s.name())
		if count {
			if err := b.compareCount(t, s, found.count); err != nil {
				return nil, err
			}
		}
	}
	for name := range sets {
		return drift("%s does not belong to it", name)
	}
	chains, err := b.readChains(b.name, t.family)
	if err != nil {
		return nil, err
	}
	missing := t.expectedRules()
	base := rules{family: t.family}.baseChains()
	for name := range missing {
		if c, ok := chains[name]; !ok || !c.is(base[name]) {
			return drift("chain %s is gone or hooked in otherwise", name)
		}
		delete(chains, name)
	}
	for name, c := range chains {
		if !t.unused[name] || c.base != nil {
			return drift("chain %s does not belong to it", name)
		}
	}
	list, err := b.readRules(b.name, t.family)
	if err != nil {
		return nil, err
	}
	found := make(map[uint64]kernelRule, len(list))
	for _, r := range list {
		found[r.handle] = r
		missing[r.chain]--
	}
	for name, n := range missing {
		if n != 0 {
			return drift("chain %s has %d rules too few (or too many)", name, n)
		}
	}
	for handle, r := range before {
		if found[handle] != r {
			return drift("a rule of chain %s was replaced", r.chain)
		}
	}
	return found, b.compareMaps(t)
}

// expectedRules returns the number of rules of each chain that there must be.
func (t *table) expectedRules() map[string]int {
	out := maps.Clone(t.chains)
	for _, c := range t.rules().fixedChains() {
		out[c.name] = len(c.rules)
	}
	out[chainFirewallCheck] += len(t.prefixes)
	return out
}

// compareMaps compares what the small maps and the interval sets hold.
func (b *Backend) compareMaps(t *table) error {
	for s, internal := range map[set]bool{setHandlers: false, setInternalHandlers: true} {
		want := map[uint32]string{}
		for c, n := range t.handlers.number {
			if !internal || t.internal[c] {
				want[dispatchKey(n, 0)] = c.chain()
			}
		}
		wrong := 0
		err := again(func() error {
			missing := maps.Clone(want)
			wrong = 0
			err := b.elements(b.name, t.family, s, func(e kernelElement) {
				handler := uint32(0)
				if len(e.key) == 4 {
					handler = binary.NativeEndian.Uint32(e.key)
				}
				if chain, ok := missing[handler]; !ok || e.chain != chain || e.verdict != unix.NFT_GOTO {
					wrong++
				}
				delete(missing, handler)
			})
			wrong += len(missing)
			return err
		})
		if err != nil {
			return err
		}
		if wrong != 0 {
			return drifted(t.family, "%d elements of %s are wrong", wrong, s.name())
		}
	}
	for _, s := range []set{setNodePortIPs, setServiceCIDRs} {
		found, err := b.readRanges(b.name, t.family, s)
		if err != nil {
			return err
		}
		if !slices.Equal(found, t.ranges[s]) {
			return drifted(t.family, "%s holds %v", s.name(), found)
		}
	}
	return nil
}

// countable is how many elements a set may have to be counted one by one.
const countable = 20000

// compareCount compares the number of a set's elements, which the kernel may have
// told; -1 if not.
func (b *Backend) compareCount(t *table, s set, have int) error {
	if s == setStickyClients || s == setNodePortIPs || s == setServiceCIDRs {
		return nil // dynamic, or compared one by one
	}
	want := t.count[s]
	if have < 0 {
		if want > countable {
			return nil
		}
		err := again(func() error {
			have = 0
			return b.elements(b.name, t.family, s, func(kernelElement) { have++ })
		})
		if err != nil {
			return err
		}
	}
	if have != want {
		return drifted(t.family, "%s has %d elements instead of %d", s.name(), have, want)
	}
	return nil
}
