//go:build linux

package nftables

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net/netip"
	"slices"
	"time"

	"golang.org/x/sys/unix"

	"github.com/go-proxier/proxier/nftables/internal/nlbatch"
	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/tracker"
)

// replace makes the tables hold the Services of the full delta d and nothing else.
func (b *Backend) replace(ctx context.Context, d *ruleset.Delta) error {
	// Transactions may be large, so replace does not keep their memory.
	defer func() { b.writer, b.spare = newWriter(b.name), nil }()
	b.discardModel(time.Now())
	var failed map[tracker.Key]error
	err := persist(func() (err error) {
		b.watched = watched{commits: b.conn.Commits()}
		if b.watched.generation, err = b.conn.Generation(); err != nil {
			return err
		}
		if failed, err = b.replaceOnce(ctx, d); err == nil {
			err = ignoreInterrupted(b.examine(false))
		}
		return err
	})
	if err != nil {
		b.tables = nil
		return fmt.Errorf("nftables: cannot replace tables: %w", err)
	}
	for _, t := range b.tables {
		t.releaseAdopted()
		t.lost.Reset()
	}
	if err := b.syncInterfaces(); err != nil {
		// Check tries again.
		b.config.Log.Warn("nftables: interfaces of the fast path are outdated, the next check tries again", slog.Any("error", err))
	}
	b.logLacking()
	return partial(failed)
}

// replaceOnce finds the tables in use and deletes the tables of the other name. It rewrites the
// tables in use in place. If the transaction is too large or the tables are not sound, it swaps
// in tables of the other name.
func (b *Backend) replaceOnce(ctx context.Context, d *ruleset.Delta) (map[tracker.Key]error, error) {
	old, err := b.inspectAll(b.config.Table)
	if err != nil {
		return nil, err
	}
	other, err := b.inspectAll(stagingOf(b.config.Table))
	if err != nil {
		return nil, err
	}
	if other.hooked && (!old.hooked || other.handle > old.handle) {
		old, other = other, old
	}
	b.name = old.name
	// A killed process left the other tables, possibly right after it swapped in the tables in
	// use.
	if err := b.deleteTables(other); err != nil {
		return nil, err
	}
	if old.sound {
		failed, err := b.rewrite(ctx, d, old)
		if errors.Is(err, nlbatch.ErrTooLarge) && old.exist {
			failed, err = b.swap(ctx, d, old, other.name)
		}
		return failed, err
	}
	// A packet that meets a transaction that deletes and creates the same table can miss both.
	// So tables of the other name serve until the new tables exist.
	failed, err := b.swap(ctx, d, old, other.name)
	if err != nil || b.name == b.config.Table {
		return failed, err
	}
	if other, err = b.inspectAll(other.name); err != nil {
		return nil, err
	}
	return b.swap(ctx, d, other, b.config.Table)
}

// swap swaps in tables of another name and deletes the old ones. In between it waits for the
// packets in flight: a packet that began before the new tables were hooked in meets the old ones
// only.
func (b *Backend) swap(ctx context.Context, d *ruleset.Delta, old *kernelTables, name string) (map[tracker.Key]error, error) {
	failed, err := b.swapIn(ctx, d, old, name)
	if err == nil {
		waitForPackets()
		err = b.deleteTables(old)
	}
	return failed, err
}

// deleteTables deletes the tables that exist.
func (b *Backend) deleteTables(k *kernelTables) error {
	w := newWriter(k.name)
	for f, t := range k.families {
		if t.exists {
			w.deleteTable(f)
		}
	}
	return w.commit(b.conn)
}

// begin writes empty tables for d and adopts the sticky pools of the tables old. It sets b.whole
// to whole. It calls edit before the tables get their sets and chains.
func (b *Backend) begin(name string, d *ruleset.Delta, old *kernelTables, whole bool, edit func(*table, *kernelTable)) {
	b.writer, b.spare, b.whole = newWriter(name), nil, whole
	b.tables = nil
	for _, f := range b.config.Families {
		t, k := newTable(f, d.Node, b.mark(), b.limits), old.families[f]
		need := t.measure(d.Changes, b.config.StickyClients, len(k.hairpin))
		t.offload = b.config.Offload
		t.adopt(k.sticky)
		edit(t, k)
		if whole {
			for s := range setCount {
				b.writer.expect(f, s, need[s].bytes)
			}
		}
		t.skeleton(b.writer)
		b.tables = append(b.tables, t)
	}
}

// fill writes the Services to the tables of begin and commits.
func (b *Backend) fill(ctx context.Context, d *ruleset.Delta, old *kernelTables) (map[tracker.Key]error, error) {
	failed, err := b.fillServices(ctx, d, old)
	for _, t := range b.tables {
		if err == nil && !t.unhooked {
			// Counts between here and the commit are lost.
			err = b.copyCounters(t, old, func(s set, list *nlbatch.Elements) error {
				b.writer.addElements(t.family, s, 0, list)
				return nil
			})
		}
	}
	if err != nil {
		return nil, errors.Join(err, b.waitCommit())
	}
	return failed, b.commit()
}

func (b *Backend) fillServices(ctx context.Context, d *ruleset.Delta, old *kernelTables) (map[tracker.Key]error, error) {
	if err := b.makeHandlers(ctx, d.Changes); err != nil {
		return nil, err
	}
	changes, err := b.byPrecedence(d.Changes, old)
	if err != nil {
		return nil, err
	}
	for _, t := range b.tables {
		for _, g := range b.graceEntries(t.family, old.families[t.family].hairpin) {
			if err := b.makeRoom(ctx, hairpinSize(t.family)+messageSize); err != nil {
				return nil, err
			}
			t.addGrace(g, b.writer)
		}
		// Untranslated packets to cluster IPs are rejected or dropped only once every Service
		// is in the table.
		t.deferClusterIPs = true
	}
	failed, err := b.writeServices(ctx, changes)
	if err != nil {
		return nil, err
	}
	for _, t := range b.tables {
		for key := range t.clusterIPs {
			e := clusterIPElement(netip.AddrFrom16(key).Unmap())
			if err := b.makeRoom(ctx, e.size()+messageSize); err != nil {
				return nil, err
			}
			t.write(&e, "", b.writer)
		}
		t.deferClusterIPs = false
		t.setRanges(setServiceCIDRs, merged(d.Node.ServiceCIDRs, t.family), b.writer)
	}
	return failed, nil
}

// makeHandlers creates the handlers that the Services need. The caller adds elements to the maps
// later, because the kernel walks through a whole map when it gets a chain with a rule that
// looks it up.
//
// For the same reason makeHandlers creates the chains of all pools of up to exactBuckets
// endpoints. Otherwise the first Service with a new number of endpoints would wait for such a
// walk, several milliseconds in a large cluster. Each of these chains costs each new element
// about 15 ns, because the kernel checks the element against every rule that looks up its map; a
// cluster with Services of many sizes needs the chains anyway.
func (b *Backend) makeHandlers(ctx context.Context, changes []ruleset.Change) error {
	for _, t := range b.tables {
		for n := range exactBuckets {
			h := handler{buckets: n + 1}
			if err := b.makeRoom(ctx, t.handlerBytes(h)); err != nil {
				return err
			}
			t.makeHandlerChain(h, b.writer)
		}
	}
	for i := range changes {
		s, t := changes[i].New, b.table(changes[i].Key.Family)
		if s == nil || t == nil {
			continue
		}
		for _, h := range t.missingHandlers(s) {
			if err := b.makeRoom(ctx, t.handlerBytes(h)); err != nil {
				return err
			}
			t.handler(h, b.writer)
		}
		for _, h := range t.missingSticky(s) {
			if err := b.makeRoom(ctx, stickyHandlerSize); err != nil {
				return err
			}
			t.stickyHandler(h, b.writer)
		}
	}
	return nil
}

// rewrite replaces the contents of the tables in one transaction. If no table exists, it
// writes the tables in several transactions.
func (b *Backend) rewrite(ctx context.Context, d *ruleset.Delta, old *kernelTables) (map[tracker.Key]error, error) {
	b.begin(b.name, d, old, old.exist, func(t *table, k *kernelTable) {
		for s := range firstAllowed {
			if t.kept[s] = k.keeps(s, t.family, t.size[s]); t.kept[s] {
				t.ranges[s] = k.ranges[s]
			}
		}
		b.clear(t, k)
		if b.config.Clients != nil && !old.exist {
			t.recalled = map[netip.AddrPort][]recalled{}
		}
	})
	for _, t := range b.tables {
		if !t.kept[setStickyClients] {
			clients, err := b.readClients(t, old)
			if err != nil {
				return nil, err
			}
			b.writer.addElements(t.family, setStickyClients, 0, clients)
		}
	}
	failed, err := b.fill(ctx, d, old)
	for _, t := range b.tables {
		t.recalled = nil
	}
	if err == nil {
		for _, t := range b.tables {
			b.deleteUnused(t, old.families[t.family])
		}
	}
	return failed, err
}

// clear empties a table except for the kept sets. If the table does not exist, clear creates it.
func (b *Backend) clear(t *table, k *kernelTable) {
	if !k.exists {
		b.writer.newTable(t.family, 0)
		return
	}
	// Chains stay: kernels before 6.2 cannot delete a chain in the transaction that deletes the
	// rules and elements that refer to it.
	b.writer.deleteRules(t.family)
	kept := map[string]bool{}
	for s := range firstAllowed {
		kept[s.name()] = t.kept[s]
	}
	for name, s := range k.sets {
		// The kernel deletes anonymous sets with the foreign rules that they belong to.
		if !kept[name] && s.flags&unix.NFT_SET_ANONYMOUS == 0 {
			b.writer.delete("set", unix.NFT_MSG_DELSET, unix.NFTA_SET_NAME, t.family, name)
		}
	}
	b.clearFlowtables(t, k)
}

// deleteUnused deletes the chains of an earlier table that this table does not use. If the
// deletion fails, the chains stay and do no harm, because no rule goes to them.
func (b *Backend) deleteUnused(t *table, k *kernelTable) {
	used := t.expectedRules()
	unused := map[string]bool{}
	for name := range k.chains {
		if _, ok := used[name]; !ok {
			unused[name] = true
		}
	}
	if err := b.deleteChains(t.family, unused); err != nil {
		t.unused = unused
	}
}

// deleteGarbage deletes the chains in t.garbage with their rules. If the deletion fails, they stay
// like chains in use.
func (b *Backend) deleteGarbage(t *table) {
	if len(t.garbage) == 0 {
		return
	}
	if err := b.deleteChains(t.family, t.garbage); err == nil {
		for name := range t.garbage {
			delete(t.chains, name)
		}
		if i := slices.Index(b.tables, t); i < len(b.watched.rules) {
			maps.DeleteFunc(b.watched.rules[i], func(_ uint64, r kernelRule) bool { return t.garbage[r.chain] })
		}
	}
	clear(t.garbage)
}

// deleteChains deletes chains with their rules. It logs the error that it returns.
func (b *Backend) deleteChains(f tracker.Family, names map[string]bool) error {
	w := newWriter(b.name)
	for name := range names {
		w.delete("chain", unix.NFT_MSG_DELCHAIN, unix.NFTA_CHAIN_NAME, f, name)
	}
	err := w.commit(b.conn)
	if err != nil {
		b.config.Log.Info("nftables: cannot delete unused chains, they stay until the next full sync", slog.Any("error", err))
	}
	return err
}

// swapIn writes tables of another name in several transactions and then hooks them in, beside
// the old tables, which the caller deletes. No packet meets the new tables before. Clients that
// connect for the first time while swapIn copies the remembered clients are not remembered.
func (b *Backend) swapIn(ctx context.Context, d *ruleset.Delta, old *kernelTables, name string) (map[tracker.Key]error, error) {
	b.begin(name, d, old, false, func(t *table, _ *kernelTable) {
		t.unhooked = true
		b.writer.newTable(t.family, 0)
	})
	if err := b.commit(); err != nil {
		return nil, err
	}
	b.writer.begin()
	failed, err := b.fill(ctx, d, old)
	if err != nil {
		return nil, err
	}
	for _, t := range b.tables {
		clients, err := b.readClients(t, old)
		if err != nil {
			return nil, err
		}
		if err := b.addDivided(name, t.family, setStickyClients, clients); err != nil {
			return nil, err
		}
	}
	for _, t := range b.tables {
		err := b.copyCounters(t, old, func(s set, list *nlbatch.Elements) error {
			return b.addDivided(name, t.family, s, list)
		})
		if err != nil {
			return nil, err
		}
	}
	// A connection during a commit may meet one table in its state before the commit and the
	// other table in its state after it. So both tables are in use for a moment.
	b.writer.begin()
	for _, t := range b.tables {
		t.hook(b.writer)
	}
	if err := b.commit(); err != nil {
		return nil, err
	}
	b.name = name
	return failed, nil
}

// addDivided adds elements to a set in several transactions.
func (b *Backend) addDivided(table string, f tracker.Family, s set, list *nlbatch.Elements) error {
	for part := range list.Parts(b.conn.Limit() / 2) {
		w := newWriter(table)
		w.addElements(f, s, 0, part)
		if err := w.commit(b.conn); err != nil {
			return err
		}
	}
	return nil
}

// readClients reads the remembered clients, at most as many as the new table has room for.
func (b *Backend) readClients(t *table, old *kernelTables) (*nlbatch.Elements, error) {
	clients := &nlbatch.Elements{}
	if old.families[t.family].sticky == nil {
		return clients, nil
	}
	err := b.elements(old.name, t.family, setStickyClients, func(e kernelElement) {
		if e.expiration != nil && clients.Count() < t.size[setStickyClients] {
			clients.AddTimed(e.key, e.data, e.timeout, e.expiration)
		}
	})
	// New and expiring clients interrupt the dump. Their loss does no harm.
	return clients, ignoreInterrupted(err)
}
