package nftables

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"syscall"

	"github.com/go-proxier/proxier/internal/nft"
	"github.com/go-proxier/proxier/nftables/internal/layout"
	"github.com/go-proxier/proxier/nftables/internal/model"
	"github.com/go-proxier/proxier/ruleset/dataplane"
	"github.com/go-proxier/proxier/tracker"
)

// Traffic reads the counters in the backend's tables. Known is connections, refused and dropped packets: rules see
// the first packet of a connection only. [Backend.Apply] blocks while Traffic reads. A connection whose endpoint is
// replaced while the rules handle its first packet may be counted twice. DESIGN.md has the limits of counters.
//
// Counters stay in place when the contents of the tables are replaced, even by another process. If the tables
// themselves must be replaced, Apply copies the counters, and misses the connections of some milliseconds. A frontend
// that loses its Service loses its counters, unless it passes to another Service in a full delta, or is a NodePort
// that passes before the next call of Traffic.
//
// Traffic deletes the counters of destinations that no longer belong to a Service. The error is ctx's, wraps
// [os.ErrClosed], or is that of reading the tables.
func (b *Backend) Traffic(ctx context.Context) (*dataplane.Traffic, error) {
	if err := b.lock(ctx); err != nil {
		return nil, err
	}
	defer b.mu.Unlock()
	if b.tables == nil {
		return readTraffic(func(fn func(reader) error) error { return readTablesBy(ctx, b.conn, b.config, trafficPurpose, fn) })
	}
	out := newTraffic()
	for _, t := range b.tables.List {
		r := reader{ctx: ctx, conn: b.conn, table: b.name, family: t.Family}
		counted, err := r.counters()
		owners := owners{}
		if err == nil && len(counted) != 0 {
			owners, err = r.owners()
		}
		if err != nil {
			return nil, fmt.Errorf("nftables: cannot read traffic: %w", err)
		}
		for key, name := range t.Frontends.LongNames() {
			owners[string(key.Bytes())] = name
		}
		b.prune(t.Family, counted, owners)
		counted.sum(owners, out.Services)
	}
	return out, nil
}

// Traffic reads the counters in the tables of a [Backend] with the same configuration, in this process or another, as
// [Backend.Traffic] does. It changes nothing. Names of Service ports that are longer than 127 bytes are cut. The
// error wraps [dataplane.ErrNoRules] if there is no table. Known is empty if a version without counters wrote the
// table.
func Traffic(ctx context.Context, c Config) (*dataplane.Traffic, error) {
	return readTraffic(func(fn func(reader) error) error { return readTables(ctx, c, trafficPurpose, fn) })
}

const trafficPurpose = "read traffic"

// readTraffic reads the counters of the tables with which read calls its argument.
func readTraffic(read func(func(reader) error) error) (*dataplane.Traffic, error) {
	out, known := newTraffic(), true
	err := read(func(r reader) error {
		counted, err := r.counters()
		if errors.Is(err, syscall.ENOENT) {
			known = false
			return nil
		}
		var owners owners
		if err == nil && len(counted) != 0 {
			owners, err = r.owners()
		}
		counted.sum(owners, out.Services)
		return err
	})
	switch {
	case err != nil:
		return nil, err
	case !known:
		return &dataplane.Traffic{}, nil
	}
	return out, nil
}

func newTraffic() *dataplane.Traffic {
	return &dataplane.Traffic{
		Known:    dataplane.CountsConnections | dataplane.CountsRefused | dataplane.CountsDropped,
		Services: map[tracker.Key]dataplane.Counters{},
	}
}

// counterKey identifies a counter: its set, and the destination in the kernel's encoding.
type counterKey struct {
	set layout.Set
	at  string
}

// counters holds the packets that the counters of one family counted.
type counters map[counterKey]uint64

// counters reads the table's counters.
func (r reader) counters() (counters, error) {
	out := counters{}
	for _, s := range layout.TrafficSets() {
		err := r.each(s, func(e nft.Element) { out[counterKey{s, string(e.Key)}] = e.Packets() })
		if err != nil {
			return nil, err
		}
	}
	return out, nil
}

// sum adds the counters to the Service ports that own their destinations.
func (c counters) sum(o owners, to map[tracker.Key]dataplane.Counters) {
	for k, n := range c {
		owner, ok := o.of(k.at)
		if !ok {
			continue
		}
		total := to[owner]
		switch k.set {
		case layout.Connections:
			total.Connections += n
		case layout.Refused:
			total.Refused += n
		case layout.Dropped:
			total.Dropped += n
		}
		to[owner] = total
	}
}

// owners maps frontends to Service ports. The keys are those of service-ips and
// service-nodeports.
type owners map[string]tracker.Key

// of returns the Service port that gets packets for a destination.
func (o owners) of(at string) (tracker.Key, bool) {
	k, ok := o[at]
	if !ok {
		k, ok = o[at[max(0, len(at)-layout.PortOffset):]]
	}
	return k, ok
}

// owners returns the Service ports of the table's frontends.
func (r reader) owners() (owners, error) {
	out := owners{}
	err := r.frontends(func(e nft.Element, k tracker.Key) { out[string(e.Key)] = k })
	return out, err
}

// prune deletes the counters of destinations without a Service from c and from the kernel.
func (b *Backend) prune(f tracker.Family, c counters, o owners) {
	lists := map[layout.Set]*nft.Elements{}
	for k := range c {
		if _, ok := o.of(k.at); ok {
			continue
		}
		if lists[k.set] == nil {
			lists[k.set] = &nft.Elements{}
		}
		lists[k.set].Add([]byte(k.at), nil, "")
		delete(c, k)
	}
	for s, list := range lists {
		for part := range list.Parts(b.conn.Limit() / 2) {
			w := b.conn.NewWriter(b.name)
			w.DeleteElements(f, s, part)
			if err := b.conn.Commit(w); err != nil {
				b.logLost(err)
			}
		}
	}
}

// deleteLost deletes the counters of destinations. The transaction adds each element before it deletes it, because
// the kernel rejects the deletion of a missing element.
func (b *Backend) deleteLost(lost []model.Destination) {
	if len(lost) == 0 {
		return
	}
	sets := layout.TrafficSets()
	for _, f := range b.config.Families {
		list := &nft.Elements{}
		for i := range lost {
			if lost[i].Family == f {
				list.Add(lost[i].Key.Bytes(), nil, "")
			}
		}
		for part := range list.Parts(b.conn.Limit() / (2*len(sets) + 1)) {
			w := b.conn.NewWriter(b.name)
			for _, s := range sets {
				w.AddElements(f, s, part)
				w.DeleteElements(f, s, part)
			}
			if err := b.conn.Commit(w); err != nil {
				b.logLost(err)
			}
		}
	}
}

func (b *Backend) logLost(err error) {
	b.config.Log.Info("nftables: cannot delete counters of lost frontends", slog.Any("error", err))
}

// deletePacketCounters deletes the tables that count packets, which version 0.2.0 had.
func (b *Backend) deletePacketCounters() error {
	w := b.conn.NewWriter(packetsOf(b.config.Table))
	for _, f := range b.config.Families {
		head, err := b.conn.Table(packetsOf(b.config.Table), f)
		if err != nil {
			return err
		}
		if head.Exists {
			w.Add(&model.Tx{Objects: []model.Object{{Kind: model.DeleteTable, Family: f}}})
		}
	}
	if err := b.conn.Commit(w); err != nil {
		return fmt.Errorf("cannot delete the tables that count packets: %w", err)
	}
	return nil
}
