//go:build linux

package nftables

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"

	"golang.org/x/sys/unix"

	"github.com/go-proxier/proxier/internal/nfnl"
	"github.com/go-proxier/proxier/nftables/internal/nlbatch"
	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/tracker"
)

// trafficSets are the sets of counters. Their keys are the address, protocol and port that a
// client connects to. Rules add an element for the first packet to a destination. So an unused
// frontend takes no memory, and a change of a Service adds no counters.
var trafficSets = [...]set{setConnections, setRefused, setDropped}

// nodePortAddresses is the number of node addresses for which the sets have room, for each
// NodePort.
const nodePortAddresses = 16

// Traffic reads the counters in the backend's tables. Known is connections, refused and
// dropped packets: rules see the first packet of a connection only. [Backend.Apply] blocks while
// Traffic reads.
//
// A counter takes about 100 bytes of kernel memory. The tables have room for twice as many
// counters as the Services have addresses and 16 for each NodePort, at least 4,096 in each
// family. The kernel forwards a connection that it cannot count: one beyond that room, and one
// for which it lacks memory. A connection whose endpoint is replaced while the rules handle its
// first packet may be counted twice.
//
// Counters stay in place when the contents of the tables are replaced, also by another process.
// If the tables themselves must be replaced (see "Requirements" in the package documentation),
// or have too little room, Apply copies the counters. It then misses the connections between
// the reading and the end of the transaction that follows, which takes milliseconds.
//
// If a Service loses an address or port, its counters are deleted directly after the change is
// committed. There are two exceptions. A frontend that passes to another Service in a full delta
// takes its counters along, and so does a NodePort that passes before the next call of Traffic.
//
// Traffic deletes the counters of destinations that no longer belong to a Service. The error is
// ctx's, wraps [os.ErrClosed], or is that of reading the tables.
func (b *Backend) Traffic(ctx context.Context) (*ruleset.Traffic, error) {
	if err := b.lock(ctx); err != nil {
		return nil, err
	}
	defer b.mu.Unlock()
	if b.tables == nil {
		c := b.config
		c.NetNS = b.ns.File()
		return Traffic(ctx, c)
	}
	out := newTraffic()
	for _, t := range b.tables {
		counted, err := reader{ctx, b.conn, b.name, t.family}.counters()
		if err != nil {
			return nil, fmt.Errorf("nftables: cannot read traffic: %w", err)
		}
		owners := t.owners()
		b.prune(t, counted, owners)
		counted.sum(owners, out.Services)
	}
	return out, nil
}

// Traffic reads the counters in the tables of a [Backend] with the same configuration, in this
// process or another, as [Backend.Traffic] does. It changes nothing. Names of Service ports
// that are longer than 127 bytes are cut to that length. The error wraps [ruleset.ErrNoRules]
// if there is no table. Known is empty if a version without counters wrote the table.
func Traffic(ctx context.Context, c Config) (*ruleset.Traffic, error) {
	out, known := newTraffic(), true
	err := readTables(ctx, c, "read traffic", func(r reader) error {
		counted, err := r.counters()
		if errors.Is(err, unix.ENOENT) {
			known = false
			return nil
		}
		owners := owners{}
		if err == nil && len(counted) != 0 {
			err = r.frontends(func(e kernelElement, k tracker.Key) { owners[string(e.key)] = k })
		}
		counted.sum(owners, out.Services)
		return err
	})
	switch {
	case err != nil:
		return nil, err
	case !known:
		return &ruleset.Traffic{}, nil
	}
	return out, nil
}

func newTraffic() *ruleset.Traffic {
	return &ruleset.Traffic{
		Known:    ruleset.CountsConnections | ruleset.CountsRefused | ruleset.CountsDropped,
		Services: map[tracker.Key]ruleset.Counters{},
	}
}

// counterKey identifies a counter: its set, and the destination in the kernel's encoding.
type counterKey struct {
	set set
	at  string
}

// counters holds the packets of the counters of one table.
type counters map[counterKey]uint64

// counters reads the table's counters.
func (r reader) counters() (counters, error) {
	out := counters{}
	for _, s := range trafficSets {
		err := r.each(s, func(e kernelElement) {
			counter := parse(e.expr)
			values := parse(counter[unix.NFTA_EXPR_DATA])
			out[counterKey{s, string(e.key)}] = nfnl.Uint64(values[unix.NFTA_COUNTER_PACKETS])
		})
		if err != nil {
			return nil, err
		}
	}
	return out, nil
}

// sum adds the counters to the Service ports that own their destinations.
func (c counters) sum(o owners, to map[tracker.Key]ruleset.Counters) {
	for k, n := range c {
		owner, ok := o.of(k.at)
		if !ok {
			continue
		}
		total := to[owner]
		switch k.set {
		case setConnections:
			total.Connections += n
		case setRefused:
			total.Refused += n
		case setDropped:
			total.Dropped += n
		}
		to[owner] = total
	}
}

// owners maps frontends to Service ports. The keys are those of service-ips and
// service-nodeports.
type owners map[string]tracker.Key

// portOffset is the length of the protocol and port at the end of each key.
const portOffset = 8

// of returns the Service port that gets packets for a destination.
func (o owners) of(at string) (tracker.Key, bool) {
	k, ok := o[at]
	if !ok {
		k, ok = o[at[max(0, len(at)-portOffset):]]
	}
	return k, ok
}

// owners returns the Service ports of the table.
func (t *table) owners() owners {
	out := owners{}
	for _, s := range t.services {
		if s == nil {
			continue
		}
		for _, f := range s.rule.Frontends {
			_, _, key := keyOf(s.rule, &f)
			out[string(key.bytes())] = s.rule.Key
		}
	}
	return out
}

// prune deletes the counters of destinations without a Service from c and from the kernel. If
// it fails, the next call deletes them.
func (b *Backend) prune(t *table, c counters, o owners) {
	lists := map[set]*nlbatch.Elements{}
	for k := range c {
		if _, ok := o.of(k.at); ok {
			continue
		}
		if lists[k.set] == nil {
			lists[k.set] = &nlbatch.Elements{}
		}
		lists[k.set].Add([]byte(k.at), nil, "")
		delete(c, k)
	}
	for s, list := range lists {
		for part := range list.Parts(b.conn.Limit() / 2) {
			w := newWriter(b.name)
			w.deleteElements(t.family, s, part)
			if err := w.commit(b.conn); err != nil {
				b.logLost(err)
			}
		}
	}
}

// noteLost adds the addresses and ports that a Service loses to t.lost. It leaves out
// NodePorts: the keys of their counters contain an address of the node, which the model does
// not have.
func (t *table) noteLost(old, now *ruleset.Service) {
	if old == nil {
		return
	}
	for i := range old.Frontends {
		f := &old.Frontends[i]
		if f.Kind == ruleset.NodePort || now != nil && slices.ContainsFunc(now.Frontends, func(g ruleset.Frontend) bool {
			return g.Addr == f.Addr && g.Port == f.Port && g.Kind != ruleset.NodePort
		}) {
			continue
		}
		_, _, key := keyOf(old, f)
		t.lost.Add(key.bytes(), nil, "")
	}
}

// deleteLost deletes the counters of t.lost and empties it. The transaction adds each element
// before it deletes it, because the kernel rejects the deletion of a missing element, and the
// element exists only if a packet was counted.
func (b *Backend) deleteLost(t *table) {
	for part := range t.lost.Parts(b.conn.Limit() / (2*len(trafficSets) + 1)) {
		b.writer.begin()
		for _, s := range trafficSets {
			b.writer.addElements(t.family, s, 0, part)
			b.writer.deleteElements(t.family, s, part)
		}
		if err := b.writer.commit(b.conn); err != nil {
			b.logLost(err)
		}
	}
	t.lost.Reset()
}

func (b *Backend) logLost(err error) {
	b.config.Log.Info("nftables: cannot delete counters of lost frontends", slog.Any("error", err))
}

// copyCounters calls add with the counters of an earlier table, for each set that is not kept.
func (b *Backend) copyCounters(t *table, old *kernelTables, add func(set, *nlbatch.Elements) error) error {
	for _, s := range trafficSets {
		if t.kept[s] || !old.families[t.family].has(s, t.family) {
			continue
		}
		list := &nlbatch.Elements{}
		err := b.readAll(old.name, t.family, s, list.Reset, func(e kernelElement) {
			if e.expr != nil && list.Count() < t.size[s] {
				list.AddCounter(e.key, e.expr)
			}
		})
		if err = ignoreInterrupted(err); err == nil {
			err = add(s, list)
		}
		if err != nil {
			return err
		}
	}
	return nil
}
