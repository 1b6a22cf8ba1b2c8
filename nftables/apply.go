package nftables

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"os"
	"time"

	"github.com/go-proxier/proxier/internal/backendconf"
	"github.com/go-proxier/proxier/internal/complaint"
	"github.com/go-proxier/proxier/nftables/internal/kernel"
	"github.com/go-proxier/proxier/nftables/internal/model"
	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/ruleset/dataplane"
	"github.com/go-proxier/proxier/ruleset/maglev"
	"github.com/go-proxier/proxier/tracker"
)

// Apply makes the tables agree with d, as [ruleset.Backend] requires. A delta is committed in one transaction for
// both families. A very large delta, and one that writes the first tables, takes several transactions of whole
// Services each. A full delta replaces the tables' contents, even if another process wrote them: see "Requirements"
// in the package documentation.
//
// A [*ruleset.PartialError] names Services for which there are no pools: see "Limits" in DESIGN.md. Connections to
// their frontends without a pool are rejected. Apply returns [ruleset.ErrNeedFull] if the kernel refused a
// transaction because the tables were not as the backend left them, if a set needs more room, or if a Service does
// not fit into a transaction. If the kernel refuses a full delta, the error wraps an [*Error] and the tables are
// unchanged.
func (b *Backend) Apply(ctx context.Context, d *ruleset.Delta) error {
	if err := b.lock(ctx); err != nil {
		return err
	}
	defer b.mu.Unlock()
	switch {
	case d.Full:
		return b.replace(ctx, d)
	case b.tables == nil || b.tables.List[0].NeedsRewrite(d.Node):
		return ruleset.ErrNeedFull
	}
	began := time.Now()
	failed, err := b.update(ctx, d)
	switch {
	case err == nil:
		b.logLacking()
		return b.partial(failed)
	case ctx.Err() == nil:
		b.complaints.Write(slog.LevelWarn, complaint.Object{Kind: "table", Name: b.name}, "nftables: cannot apply change, a full sync is needed", "error", err)
		err = fmt.Errorf("%w: %w", ruleset.ErrNeedFull, err)
	}
	b.discard(began)
	return err
}

// lock locks b.mu, unless ctx is done or the backend is closed.
func (b *Backend) lock(ctx context.Context) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	b.mu.Lock()
	if b.conn.Closed() {
		b.mu.Unlock()
		return errClosed
	}
	return nil
}

func (c Config) rules(f tracker.Family, n *ruleset.Node) kernel.Rules {
	r := kernel.Rules{Family: f, Mark: uint32(c.MasqueradeMark), Seed: maglev.Seed32(n.HashSeed), Local: n.LocalTraffic, OwnNodePorts: model.OwnNodePorts(n, f), Stages: kernel.Stages(c.Stages)}
	if o := c.Offload; o != nil {
		r.Offload = &kernel.Offload{AfterPackets: o.afterPackets, UDP: o.udp}
	}
	return r
}

func (b *Backend) writer(name string, n *ruleset.Node) writer {
	return b.conn.NewWriter(name, b.rules(n)...)
}

func (b *Backend) rules(n *ruleset.Node) (out []kernel.Rules) {
	for _, f := range b.config.Families {
		out = append(out, b.config.rules(f, n))
	}
	return out
}

// discard discards the models after a failure that left the kernel state unknown. What was written from the given
// time on may be missing from the kernel.
func (b *Backend) discard(from time.Time) {
	if b.tables != nil {
		b.inGrace = map[tracker.Family]map[netip.Addr]time.Time{}
		for _, t := range b.tables.List {
			b.inGrace[t.Family] = t.Hairpin.InGrace(from)
		}
	}
	b.tables = nil
}

func (b *Backend) update(ctx context.Context, d *ruleset.Delta) (map[tracker.Key]error, error) {
	b.sink.begin()
	failed, err := b.tables.Update(ctx, d, b.sink)
	if err != nil {
		return nil, errors.Join(err, b.sink.wait())
	}
	b.deleteLost(b.sink.lost)
	for _, t := range b.tables.List {
		b.deleteGarbage(t)
	}
	if b.sink.structural {
		// Changes that another process made before or during the transaction must not pass for the backend's own.
		return failed, kernel.IgnoreInterrupted(b.examine(false))
	}
	return failed, nil
}

// logLacking logs the Services that lack client affinity since the last delta.
func (b *Backend) logLacking() {
	b.tables.Lacking(func(k tracker.Key, err error) {
		backendconf.Complain(b.complaints, slog.LevelWarn, k, "nftables: service is forwarded without client affinity", err)
	})
}

// partial logs the Services for which there are no pools, and returns the error that names them, or nil.
func (b *Backend) partial(failed map[tracker.Key]error) error {
	for k, err := range failed {
		backendconf.Complain(b.complaints, slog.LevelError, k, "nftables: connections to service are rejected", err)
	}
	return partial(failed)
}

func partial(failed map[tracker.Key]error) error {
	if len(failed) == 0 {
		return nil
	}
	return &ruleset.PartialError{Failed: failed}
}

var errClosed = fmt.Errorf("nftables: backend: %w", os.ErrClosed)

// logger returns a function that logs a transaction at [dataplane.LevelTransaction], as "nft -f" reads it.
func (b *Backend) logger(name string, n *ruleset.Node) func(*model.Tx) {
	return func(tx *model.Tx) {
		ctx := context.Background()
		if !b.config.Log.Enabled(ctx, dataplane.LevelTransaction) {
			return
		}
		text := kernel.NewText(name, b.rules(n)...)
		text.Add(tx)
		text.Finish()
		if text.Len() != 0 {
			b.config.Log.Log(ctx, dataplane.LevelTransaction, "nftables: transaction", "input", text.String())
		}
	}
}
