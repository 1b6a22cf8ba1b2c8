package nftables

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"syscall"
	"time"

	"github.com/go-proxier/proxier/internal/nft"
	"github.com/go-proxier/proxier/nftables/internal/kernel"
	"github.com/go-proxier/proxier/nftables/internal/layout"
	"github.com/go-proxier/proxier/nftables/internal/model"
	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/ruleset/dataplane"
	"github.com/go-proxier/proxier/tracker"
)

// replace makes the tables hold the Services of the full delta d and nothing else.
func (b *Backend) replace(ctx context.Context, d *ruleset.Delta) error {
	b.discard(time.Now())
	b.unused = map[tracker.Family]map[string]bool{}
	var failed map[tracker.Key]error
	err := persist(func() (err error) {
		b.tables = nil
		b.watched = watched{commits: b.conn.Commits()}
		if b.watched.generation, err = b.conn.Generation(); err != nil {
			return err
		}
		if failed, err = b.replaceOnce(ctx, d); err == nil {
			err = kernel.IgnoreInterrupted(b.deletePacketCounters())
		}
		if err == nil {
			err = kernel.IgnoreInterrupted(b.examine(false))
		}
		return err
	})
	if err != nil {
		b.tables = nil
		return fmt.Errorf("nftables: cannot replace tables: %w", err)
	}
	b.started = true
	node := d.Node // not d, which holds every Service as it is now
	b.sink = newStreamSink(b.conn, func() writer { return b.writer(b.name, node) }, b.logger(b.name, node))
	for _, t := range b.tables.List {
		t.Pools.ReleaseAdopted()
	}
	if err := b.syncInterfaces(); err != nil {
		// Check tries again.
		b.config.Log.Warn("nftables: interfaces of the fast path are outdated, the next check tries again", slog.Any("error", err))
	}
	b.logLacking()
	return b.partial(failed)
}

// persist repeats f, at most five times, if it fails because another process changed the same tables concurrently.
func persist(f func() error) (err error) {
	for range 5 {
		err = f()
		var drift *dataplane.DriftError
		if !errors.As(err, &drift) && !errors.Is(err, syscall.ENOENT) && !errors.Is(err, syscall.EEXIST) && !errors.Is(err, syscall.EBUSY) {
			break
		}
	}
	return err
}

// replaceOnce deletes the tables of the other name and rewrites those in use in place. If the transaction is too
// large or the tables are not sound, it swaps in tables of the other name.
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
		failed, err := b.perform(ctx, d, old, old.name, (*tables).writeInPlace)
		if errors.Is(err, ErrTooLarge) {
			// There may be a part of the first tables.
			if old, err = b.inspectAll(old.name); err == nil {
				failed, err = b.swap(ctx, d, old, other.name)
			}
		}
		return failed, err
	}
	// A packet that meets a transaction that deletes and creates the same table can miss both. So tables of the other
	// name serve until the new tables exist.
	failed, err := b.swap(ctx, d, old, other.name)
	if err != nil || b.name == b.config.Table {
		return failed, err
	}
	if other, err = b.inspectAll(other.name); err != nil {
		return nil, err
	}
	return b.swap(ctx, d, other, b.config.Table)
}

// swap swaps in tables of another name and deletes the old ones. In between it waits for the packets that meet the
// old ones only.
func (b *Backend) swap(ctx context.Context, d *ruleset.Delta, old *kernelTables, name string) (map[tracker.Key]error, error) {
	failed, err := b.perform(ctx, d, old, name, (*tables).writeStaged)
	if err == nil {
		b.conn.WaitForPackets()
		err = b.deleteTables(old)
	}
	return failed, err
}

func (b *Backend) deleteTables(k *kernelTables) error {
	tx := &model.Tx{}
	for f, t := range k.families {
		if t.Exists {
			tx.Object(model.Object{Kind: model.DeleteTable, Family: f})
		}
	}
	return b.commit(k.name, tx)
}

// commit commits a transaction of objects that have no rules.
func (b *Backend) commit(name string, tx *model.Tx) error {
	w := b.conn.NewWriter(name)
	w.Add(tx)
	return b.conn.Commit(w)
}

// perform replaces old tables by those of a name. write is a method that writes them.
func (b *Backend) perform(ctx context.Context, d *ruleset.Delta, old *kernelTables, name string, write func(*tables, context.Context) (map[tracker.Key]error, error)) (map[tracker.Key]error, error) {
	r := &tables{b: b, d: d, old: old, name: name}
	failed, err := write(r, ctx)
	if err != nil {
		return nil, err
	}
	b.name, b.tables = name, r.model
	return failed, nil
}

// tables are tables that replace others.
type tables struct {
	b    *Backend
	d    *ruleset.Delta
	old  *kernelTables
	name string
	// model is the model of the new tables. create creates them.
	model  *model.Tables
	create model.Tx
}

// plan makes the models of the new tables. create adds the creation of one of them to r.create.
func (r *tables) plan(create func(*model.Table, *kernelTable)) {
	var list []*model.Table
	for _, f := range r.b.config.Families {
		k := r.old.families[f]
		t := model.NewTable(f, r.d.Node, r.b.layout, r.d.Changes, len(k.hairpin))
		t.Room.KeepSizes(func(s layout.Set) int { return k.sets[s.Name()].Size })
		t.Pools.Adopt(k.sticky)
		create(t, k)
		list = append(list, t)
	}
	r.model = model.NewTables(list...)
}

func (r *tables) write(ctx context.Context, sink model.Sink) (map[tracker.Key]error, error) {
	grace := map[tracker.Family][]model.GraceEntry{}
	for f, k := range r.old.families {
		grace[f] = r.b.layout.GraceEntries(k.hairpin, r.b.inGrace[f])
	}
	return r.model.Fill(ctx, r.d, sink, &r.create, grace)
}

// stream writes the Services to the new tables in several transactions.
func (r *tables) stream(ctx context.Context) (map[tracker.Key]error, error) {
	p := newStreamSink(r.b.conn, func() writer { return r.b.writer(r.name, r.d.Node) }, r.b.logger(r.name, r.d.Node))
	failed, err := r.write(ctx, p)
	if err != nil {
		return nil, errors.Join(err, p.wait())
	}
	return failed, nil
}

// clients reads the remembered clients, at most as many as the new table has room for.
func (r *tables) clients(t *model.Table) (*nft.Elements, error) {
	clients := &nft.Elements{}
	if r.old.families[t.Family].sticky == nil {
		return clients, nil
	}
	err := r.b.conn.Elements(r.old.name, t.Family, layout.StickyClients, func(e nft.Element) {
		if e.Expiration != nil && clients.Count() < t.Room.Size(layout.StickyClients) {
			clients.AddTimed(e.Key, e.Data, e.Timeout, e.Expiration)
		}
	})
	// New and expiring clients interrupt the dump. Their loss does no harm.
	return clients, kernel.IgnoreInterrupted(err)
}

// writeInPlace rewrites the contents of tables in one transaction, or writes the first tables in several.
func (r *tables) writeInPlace(ctx context.Context) (failed map[tracker.Key]error, err error) {
	r.plan(func(t *model.Table, k *kernelTable) {
		kept := map[layout.Set]bool{}
		for s := range layout.FirstAllowed {
			kept[s] = k.keeps(s, t.Family, t.Room.Size(s))
			if kept[s] && s.Interval() {
				t.Intervals.KeepRanges(s, k.ranges[s])
			}
		}
		keptFlowtable := r.clear(t.Family, k, kept)
		if r.b.config.Clients != nil && !r.old.exist {
			t.Affinity.Recall(r.b.config.Clients)
		}
		t.Create(kept, keptFlowtable, &r.create)
		t.Hook(&r.create)
	})
	if r.old.exist {
		w := r.b.writer(r.name, r.d.Node)
		failed, err = r.write(ctx, &batchSink{conn: r.b.conn, writer: w, last: r.copyPackets, log: r.b.logger(r.name, r.d.Node)})
	} else {
		failed, err = r.stream(ctx)
	}
	if err == nil {
		r.deleteUnused()
	}
	return failed, err
}

// clear empties a table, or creates it, except for the kept sets. It reports whether the flowtable stays, with its
// connections.
func (r *tables) clear(f tracker.Family, k *kernelTable, kept map[layout.Set]bool) (keptFlowtable bool) {
	if !k.Exists {
		r.create.Object(model.Object{Kind: model.CreateTable, Family: f})
		return false
	}
	// Kernels before 6.2 cannot delete a chain in the transaction that deletes the rules and elements that refer to
	// it.
	r.create.Object(model.Object{Kind: model.DeleteRules, Family: f})
	stays := map[string]bool{}
	for s := range layout.FirstAllowed {
		stays[s.Name()] = kept[s]
	}
	for name := range k.sets {
		if !stays[name] {
			r.create.Object(model.Object{Kind: model.DeleteSet, Family: f, Name: name})
		}
	}
	for name, ft := range k.flowtables {
		if name == layout.FastPath && r.b.config.Offload != nil && ft.Sound {
			keptFlowtable = true
			continue
		}
		r.create.Object(model.Object{Kind: model.DeleteFlowtable, Family: f, Name: name})
	}
	return keptFlowtable
}

// copyPackets copies the remembered clients and the counters to sets that do not stay. Counts between here and the
// commit are lost.
func (r *tables) copyPackets(w writer) error {
	for _, t := range r.model.List {
		k := r.old.families[t.Family]
		if !k.keeps(layout.StickyClients, t.Family, 0) {
			clients, err := r.clients(t)
			if err != nil {
				return err
			}
			w.AddElements(t.Family, layout.StickyClients, clients)
		}
		stays := func(s layout.Set) bool { return k.keeps(s, t.Family, t.Room.Size(s)) }
		err := r.counters(t, stays, func(s layout.Set, list *nft.Elements) error {
			w.AddElements(t.Family, s, list)
			return nil
		})
		if err != nil {
			return err
		}
	}
	return nil
}

// deleteUnused deletes the chains of the earlier tables that these tables do not use. Those that stay do no harm,
// because no rule goes to them.
func (r *tables) deleteUnused() {
	for _, t := range r.model.List {
		t.Affinity.Recall(nil)
		_, used := r.b.expectedChains(t)
		unused := map[string]bool{}
		for name := range r.old.families[t.Family].chains {
			if _, ok := used[name]; !ok {
				unused[name] = true
			}
		}
		if err := r.b.deleteChains(r.name, t.Family, unused); err != nil {
			r.b.unused[t.Family] = unused
		}
	}
}

// deleteGarbage deletes the chains that no rule leads to any more. If the deletion fails, they stay like chains in
// use.
func (b *Backend) deleteGarbage(t *model.Table) {
	garbage := t.Chains.Garbage()
	if len(garbage) == 0 {
		return
	}
	err := b.deleteChains(b.name, t.Family, garbage)
	if err == nil {
		b.forgetRules(t, func(chain string) bool { return garbage[chain] })
	}
	t.Chains.DropGarbage(err == nil)
}

// forgetRules removes the rules of chains, which the backend deleted or replaced, from those that must still exist.
func (b *Backend) forgetRules(t *model.Table, chain func(string) bool) {
	if i := slices.Index(b.tables.List, t); i < len(b.watched.rules) {
		maps.DeleteFunc(b.watched.rules[i], func(_ uint64, r nft.Rule) bool { return chain(r.Chain) })
	}
}

// deleteChains deletes chains with their rules. It logs the error that it returns.
func (b *Backend) deleteChains(table string, f tracker.Family, names map[string]bool) error {
	tx := &model.Tx{}
	for name := range names {
		tx.Object(model.Object{Kind: model.DeleteChain, Family: f, Name: name})
	}
	err := b.commit(table, tx)
	if err != nil {
		b.config.Log.Info("nftables: cannot delete unused chains, they stay until the next full sync", slog.Any("error", err))
	}
	return err
}

// writeStaged writes tables of another name in several transactions and then hooks them in, beside the old tables,
// which the caller deletes. Clients that connect for the first time while it copies the remembered clients are not
// remembered.
func (r *tables) writeStaged(ctx context.Context) (map[tracker.Key]error, error) {
	r.plan(func(t *model.Table, _ *kernelTable) {
		r.create.Object(model.Object{Kind: model.CreateTable, Family: t.Family})
		t.Create(nil, false, &r.create)
	})
	r.model.Unhooked = true
	failed, err := r.stream(ctx)
	r.model.Unhooked = false
	if err != nil {
		return nil, err
	}
	for _, t := range r.model.List {
		clients, err := r.clients(t)
		if err != nil {
			return nil, err
		}
		if err := r.add(t.Family, layout.StickyClients, clients); err != nil {
			return nil, err
		}
		stays := func(layout.Set) bool { return false }
		err = r.counters(t, stays, func(s layout.Set, list *nft.Elements) error { return r.add(t.Family, s, list) })
		if err != nil {
			return nil, err
		}
	}
	// A connection during a commit may meet one table before the commit and the other after it, so both are in use
	// for a moment.
	tx := &model.Tx{}
	for _, t := range r.model.List {
		t.Hook(tx)
	}
	w := r.b.writer(r.name, r.d.Node)
	w.Add(tx)
	return failed, r.b.conn.Commit(w)
}

func (r *tables) add(f tracker.Family, s layout.Set, list *nft.Elements) error {
	for part := range list.Parts(r.b.conn.Limit() / 2) {
		w := r.b.conn.NewWriter(r.name)
		w.AddElements(f, s, part)
		if err := r.b.conn.Commit(w); err != nil {
			return err
		}
	}
	return nil
}

// counters calls add with the counters of the old table, for each set of counters that does not
// stay.
func (r *tables) counters(t *model.Table, stays func(layout.Set) bool, add func(layout.Set, *nft.Elements) error) error {
	for _, s := range layout.TrafficSets() {
		if stays(s) || !r.old.families[t.Family].has(s, t.Family) {
			continue
		}
		list := &nft.Elements{}
		err := readAll(r.b.conn, r.old.name, t.Family, s, list.Reset, func(e nft.Element) {
			if e.Expr != nil && list.Count() < t.Room.Size(s) {
				list.AddCounter(e.Key, e.Expr)
			}
		})
		if err = kernel.IgnoreInterrupted(err); err == nil {
			err = add(s, list)
		}
		if err != nil {
			return err
		}
	}
	return nil
}
