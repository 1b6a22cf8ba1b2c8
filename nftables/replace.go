//go:build linux

package nftables

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"slices"
	"time"

	"golang.org/x/sys/unix"
	v1 "k8s.io/api/core/v1"

	"github.com/go-proxier/proxier/nftables/internal/nlbatch"
	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/tracker"
)

// replace makes the tables hold what d says and nothing else.
func (b *Backend) replace(ctx context.Context, d *ruleset.Delta) error {
	// Transactions may be large; their memory is not kept.
	defer func() { b.writer, b.spare = newWriter(b.name, b.mark()), nil }()
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
		return fmt.Errorf("nftables: replace tables: %w", err)
	}
	for _, t := range b.tables {
		t.disown()
	}
	return partial(failed)
}

func (b *Backend) replaceOnce(ctx context.Context, d *ruleset.Delta) (map[tracker.Key]error, error) {
	spare := stagingOf(b.config.Table)
	kernel, err := b.inspectAll(b.config.Table)
	if err != nil {
		return nil, err
	}
	other, err := b.inspectAll(spare)
	if err != nil {
		return nil, err
	}
	b.name = b.config.Table
	if other.hooked() && (!kernel.hooked() || other.handle() > kernel.handle()) {
		b.name, spare, kernel, other = spare, b.name, other, kernel
	}
	// What is left there is of a process that was killed, at the worst when one table
	// had just taken the other's place.
	if err := b.deleteTables(spare, other); err != nil {
		return nil, err
	}
	failed, err := b.rewrite(ctx, d, kernel)
	if errors.Is(err, nlbatch.ErrTooLarge) && kernel.exist() {
		old := b.name
		if failed, err = b.swapIn(ctx, d, kernel, spare); err == nil {
			err = b.deleteTables(old, kernel)
		}
	}
	return failed, err
}

// kernelTables is the tables of one name, by family.
type kernelTables map[tracker.Family]*kernelTable

func (k kernelTables) exist() bool {
	for _, t := range k {
		if t.exists {
			return true
		}
	}
	return false
}

func (k kernelTables) hooked() bool {
	for _, t := range k {
		if t.hooked {
			return true
		}
	}
	return false
}

// handle is the largest of the tables'.
func (k kernelTables) handle() (h uint64) {
	for _, t := range k {
		h = max(h, t.handle)
	}
	return h
}

func (b *Backend) inspectAll(name string) (kernelTables, error) {
	out := kernelTables{}
	for _, f := range b.config.Families {
		var err error
		if out[f], err = b.inspect(name, f); err != nil {
			return nil, fmt.Errorf("read table: %w", err)
		}
	}
	return out, nil
}

func (b *Backend) deleteTables(name string, k kernelTables) error {
	var batch nlbatch.Batch
	batch.Reset()
	for f, t := range k {
		if t.exists {
			deleteTable(&batch, f, name)
		}
	}
	return b.conn.Commit(&batch)
}

// begin makes the tables that d is written to, empty, taking over what the kernel
// remembers clients by. Divide says whether that will be several transactions.
func (b *Backend) begin(name string, d *ruleset.Delta, k kernelTables, divide bool, edit func(*table)) {
	b.writer, b.spare = newWriter(name, b.mark()), nil
	b.tables = nil
	for _, f := range b.config.Families {
		t := newTable(f, d.Node)
		need := t.measure(d.Changes, b.config.StickyClients, len(k[f].hairpin))
		t.adopt(k[f].sticky)
		edit(t)
		if !divide {
			for s, n := range need {
				b.writer.expect(t, s, n)
			}
		}
		t.skeleton(b.writer)
		b.tables = append(b.tables, t)
	}
}

// fill writes the Services to tables that were begun in place of others, dividing
// it into transactions or not. It commits all of it.
func (b *Backend) fill(ctx context.Context, d *ruleset.Delta, k kernelTables, divide bool) (map[tracker.Key]error, error) {
	failed, err := b.fillServices(ctx, d, k, divide)
	if err != nil {
		return nil, errors.Join(err, b.waitCommit())
	}
	return failed, b.commit()
}

// makeHandlers makes the handlers that the Services need. It is done before the maps
// have elements, because the kernel walks through all of a map when it is given a
// chain that looks something up in it.
func (b *Backend) makeHandlers(ctx context.Context, changes []ruleset.Change) error {
	for i := range changes {
		s := changes[i].New
		t := b.table(changes[i].Key.Family)
		if s == nil || t == nil {
			continue
		}
		missing := t.missingHandlers(s)
		if !t.handlers.room(missing) {
			continue
		}
		for _, c := range missing {
			if err := b.makeRoom(ctx, t.handlerBytes(c)); err != nil {
				return err
			}
			t.handler(c, b.writer)
		}
	}
	return nil
}

func (b *Backend) fillServices(ctx context.Context, d *ruleset.Delta, k kernelTables, divide bool) (map[tracker.Key]error, error) {
	room := func(t *table, s set) error {
		if !divide {
			return nil
		}
		return b.makeRoom(ctx, t.elementSize[s]+messageSize)
	}
	if divide {
		if err := b.makeHandlers(ctx, d.Changes); err != nil {
			return nil, err
		}
	}
	for _, t := range b.tables {
		if b.gracePeriod == 0 {
			break
		}
		for _, l := range b.grace(t.family, k[t.family].hairpin) {
			if err := room(t, setHairpin); err != nil {
				return nil, err
			}
			t.addGrace(l, b.writer)
		}
	}
	// What refuses or drops packets to cluster IPs that were not translated comes
	// when every Service is there.
	later := make([][]netip.Addr, len(b.tables))
	for i, t := range b.tables {
		if divide {
			later[i] = make([]netip.Addr, 0, len(d.Changes)/len(b.tables))
			t.later = &later[i]
		}
	}
	failed, err := b.write(ctx, d.Changes, divide)
	if err == nil {
		err = b.keepOld(ctx, d.Changes, failed, divide)
	}
	if err != nil {
		return nil, err
	}
	for i, t := range b.tables {
		t.later = nil
		for _, a := range later[i] {
			if err := room(t, setClusterIPs); err != nil {
				return nil, err
			}
			b.writer.addCounted(t, setClusterIPs, a)
		}
		b.writer.setRanges(t, setServiceCIDRs, merged(d.Node.ServiceCIDRs, t.family))
	}
	return failed, nil
}

// keepOld writes Services that failed as they were last acknowledged, as far as
// that takes nothing that is another's now.
func (b *Backend) keepOld(ctx context.Context, changes []ruleset.Change, failed map[tracker.Key]error, divide bool) error {
	if len(failed) == 0 {
		return nil
	}
	taken := map[ownership]bool{}
	for i := range changes {
		if s := changes[i].New; s != nil && failed[s.Key] == nil {
			for j := range s.Frontends {
				taken[ownershipOf(s, &s.Frontends[j])] = true
			}
		}
	}
	for i := range changes {
		c := &changes[i]
		if failed[c.Key] == nil || c.Old == nil || c.Old == c.New {
			continue
		}
		old := *c.Old
		old.Frontends = nil
		for j := range c.Old.Frontends {
			if p := ownershipOf(c.Old, &c.Old.Frontends[j]); !taken[p] {
				taken[p] = true
				old.Frontends = append(old.Frontends, c.Old.Frontends[j])
			}
		}
		t := b.table(c.Key.Family)
		cannot, err := b.writeService(ctx, t, &ruleset.Change{Key: c.Key, New: &old}, divide)
		if err != nil {
			return err
		}
		if cannot != nil {
			b.config.Log.Error("nftables: service is not served at all", slog.String("service", c.Key.String()), slog.Any("error", cannot))
		}
	}
	return nil
}

// ownership is what only one Service can have: an address or, without one, a NodePort.
type ownership struct {
	family   tracker.Family
	addr     netip.Addr
	port     uint16
	protocol v1.Protocol
}

func ownershipOf(s *ruleset.Service, f *ruleset.Frontend) ownership {
	p := ownership{family: s.Key.Family, port: f.Port, protocol: s.Key.Protocol}
	if f.Kind != ruleset.NodePort {
		p.addr = f.Addr
	}
	return p
}

// grace returns which endpoints of the table before are to linger in the next
// one, those that did already first: all of them until they have for long enough,
// since for all that is known a connection is on its way.
func (b *Backend) grace(f tracker.Family, hairpin []netip.Addr) []graceEntry {
	now := b.writer.now
	var out []graceEntry
	for _, a := range hairpin {
		since, inGrace := b.inGrace[index(f)][a]
		if !inGrace {
			since = now
		}
		if !inGrace || now.Sub(since) < b.gracePeriod {
			out = append(out, graceEntry{a, since})
		}
	}
	slices.SortStableFunc(out, func(a, b graceEntry) int { return a.since.Compare(b.since) })
	return out
}

// rewrite replaces what is in the tables in one transaction, or writes them in
// several if there are none.
func (b *Backend) rewrite(ctx context.Context, d *ruleset.Delta, k kernelTables) (map[tracker.Key]error, error) {
	divide := !k.exist()
	b.begin(b.name, d, k, divide, func(t *table) {
		for s := range firstAllowed {
			if t.kept[s] = k[t.family].keeps(s, t.family); t.kept[s] {
				t.ranges[s] = k[t.family].ranges[s]
			}
		}
		b.clear(t, k[t.family])
	})
	for _, t := range b.tables {
		if !t.kept[setStickyClients] {
			clients, err := b.readClients(t, k[t.family])
			if err != nil {
				return nil, err
			}
			b.writer.addClients(t, clients)
		}
	}
	failed, err := b.fill(ctx, d, k, divide)
	if err == nil {
		for _, t := range b.tables {
			b.deleteUnused(t, k[t.family])
		}
	}
	return failed, err
}

// clear empties a table that exists, as far as it is not taken over, or makes it.
func (b *Backend) clear(t *table, k *kernelTable) {
	switch {
	case !k.exists:
		b.writer.newTable(t)
	case !k.sound:
		b.writer.deleteTable(t.family)
		b.writer.newTable(t)
	default:
		// Chains stay: kernels before 6.2 cannot delete one in the transaction that
		// deletes what refers to it.
		b.writer.deleteRules(t.family)
		kept := map[string]bool{}
		for s := range firstAllowed {
			kept[s.name()] = t.kept[s]
		}
		for name, s := range k.sets {
			// Anonymous sets go with the rules of somebody else that they belong to.
			if !kept[name] && s.flags&unix.NFT_SET_ANONYMOUS == 0 {
				b.writer.deleteSet(t.family, name)
			}
		}
	}
}

// deleteUnused deletes chains that an earlier table needed and this one does not.
// It matters little whether it succeeds: nothing goes to them.
func (b *Backend) deleteUnused(t *table, k *kernelTable) {
	if !k.sound {
		return
	}
	used := map[string]bool{}
	for _, c := range b.writer.rules(t).fixedChains() {
		used[c.name] = true
	}
	w := newWriter(b.name, b.mark())
	unused := map[string]bool{}
	for name := range k.chains {
		if _, ok := t.chains[name]; !ok && !used[name] {
			unused[name] = true
			w.deleteChain(t.family, name)
		}
	}
	batch, _ := w.finish(nil)
	if err := b.conn.Commit(batch); err != nil {
		t.unused = unused
		b.config.Log.Info("nftables: unused chains stay until the next full sync", slog.Any("error", err))
	}
}

// swapIn writes tables of another name, which no packet meets, in several
// transactions, and then has packets meet them as well as those in use, which are
// to be deleted. Clients that are remembered while it copies what is remembered
// are forgotten.
func (b *Backend) swapIn(ctx context.Context, d *ruleset.Delta, k kernelTables, name string) (map[tracker.Key]error, error) {
	b.begin(name, d, k, true, func(t *table) {
		t.unhooked = true
		b.writer.newTable(t)
	})
	if err := b.commit(); err != nil {
		return nil, err
	}
	b.writer.begin()
	failed, err := b.fill(ctx, d, k, true)
	if err != nil {
		return nil, err
	}
	for _, t := range b.tables {
		if err := b.copyClients(t, k[t.family], name); err != nil {
			return nil, err
		}
	}
	// A connection that is looked at during a commit may meet one table as it was
	// before and the other as it is after it. So both are in use for a moment.
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

// readClients reads what clients are remembered by.
func (b *Backend) readClients(t *table, k *kernelTable) (*nlbatch.Elements, error) {
	clients := &nlbatch.Elements{}
	if k.sticky == nil {
		return clients, nil
	}
	err := b.elements(b.name, t.family, setStickyClients, func(e element) {
		if e.expiration != nil && clients.Count() < t.size[setStickyClients] {
			clients.AddTimed(e.key, e.data, e.timeout, e.expiration)
		}
	})
	// Clients that come and go interrupt the reading, and are no loss.
	return clients, ignoreInterrupted(err)
}

// copyClients copies what clients are remembered by to the tables of a name.
func (b *Backend) copyClients(t *table, k *kernelTable, name string) error {
	clients, err := b.readClients(t, k)
	if err != nil {
		return err
	}
	return clients.Divide(b.conn.Limit()/2, func(part *nlbatch.Elements) error {
		w := newWriter(name, b.mark())
		w.addClients(t, part)
		batch, _ := w.finish(nil)
		return b.conn.Commit(batch)
	})
}
