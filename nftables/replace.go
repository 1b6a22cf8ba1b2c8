package nftables

import (
	"context"
	"fmt"
	"log/slog"

	"github.com/go-proxier/proxier/ruleset"
)

// replace makes the tables hold what d says and nothing else.
func (b *Backend) replace(ctx context.Context, d *ruleset.Delta) error {
	b.tables = nil
	// The transaction may be large; its memory is not kept.
	b.writer = newWriter(b.config.Table, b.config.mark())
	defer func() { b.writer = newWriter(b.config.Table, b.config.mark()) }()

	fresh := true
	kernel := make([]*kernelTable, len(b.config.Families))
	for i, f := range b.config.Families {
		var err error
		if kernel[i], err = b.inspect(f); err != nil {
			return fmt.Errorf("nftables: read table: %w", err)
		}
		fresh = fresh && !kernel[i].exists
	}
	for i, f := range b.config.Families {
		t := newTable(f, d.Node)
		t.measure(d.Changes, b.config.StickyClients)
		if kernel[i].compatible {
			t.keepsClients = true
			t.adopt(kernel[i].sticky)
		}
		b.clear(t, kernel[i])
		t.skeleton(b.writer)
		b.tables = append(b.tables, t)
	}

	failed, err := b.write(ctx, d.Changes, fresh)
	if err == nil {
		// What drops packets to addresses without a Service comes when every Service is
		// there.
		for _, t := range b.tables {
			b.writer.addRanges(t, setServiceCIDRs, merged(d.Node.ServiceCIDRs, t.family))
		}
		err = b.commit()
	}
	if err != nil {
		b.tables = nil
		return fmt.Errorf("nftables: replace tables: %w", err)
	}
	for i, t := range b.tables {
		t.adopted = nil
		b.deleteUnused(t, kernel[i])
	}
	if err := b.remember(); err != nil {
		b.tables = nil
		return fmt.Errorf("nftables: read back: %w", err)
	}
	return partial(failed)
}

// clear empties a table that exists, as far as it is not taken over, or makes it.
func (b *Backend) clear(t *table, k *kernelTable) {
	switch {
	case !k.exists:
		b.writer.newTable(t)
	case !k.compatible:
		b.writer.deleteTable(t.family)
		b.writer.newTable(t)
	default:
		// Chains stay: kernels before 6.2 cannot delete one in the transaction that
		// deletes what refers to it.
		b.writer.deleteRules(t.family)
		for _, name := range k.sets {
			if name != setStickyClients.name() {
				b.writer.deleteSet(t.family, name)
			}
		}
	}
}

// deleteUnused deletes chains that an earlier table needed and this one does not.
// It matters little whether it succeeds: nothing goes to them.
func (b *Backend) deleteUnused(t *table, k *kernelTable) {
	if !k.compatible {
		return
	}
	used := map[string]bool{}
	for _, c := range b.writer.rules(t).fixedChains() {
		used[c.name] = true
	}
	w := newWriter(b.config.Table, b.config.mark())
	for _, name := range k.chains {
		if !used[name] && !t.chains[name] {
			w.deleteChain(t.family, name)
		}
	}
	batch, _ := w.finish(nil)
	if batch.Empty() {
		return
	}
	if err := b.conn.Commit(batch); err != nil {
		b.config.Log.Info("nftables: unused chains stay until the next full sync", slog.Any("error", err))
		return
	}
}
