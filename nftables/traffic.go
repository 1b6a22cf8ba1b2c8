//go:build linux

package nftables

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strings"

	"golang.org/x/sys/unix"
	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/go-proxier/proxier/internal/inet"
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
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.conn.Closed() {
		return nil, errClosed
	}
	if b.tables == nil {
		return readTraffic(ctx, b.conn, b.config)
	}
	out := newTraffic()
	for _, t := range b.tables {
		counted, err := readCounters(b.conn, b.name, t.family)
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
	c, err := c.withDefaults()
	if err != nil {
		return nil, err
	}
	conn, err := nlbatch.Dial(c.NetNS)
	if err != nil {
		return nil, unsupportedSocket(err)
	}
	defer conn.Close()
	return readTraffic(ctx, conn, c)
}

func newTraffic() *ruleset.Traffic {
	return &ruleset.Traffic{
		Known:    ruleset.CountsConnections | ruleset.CountsRefused | ruleset.CountsDropped,
		Services: map[tracker.Key]ruleset.Counters{},
	}
}

// readTraffic reads the counters and the names of Service ports from the kernel.
func readTraffic(ctx context.Context, conn *nlbatch.Conn, c Config) (*ruleset.Traffic, error) {
	out, any := newTraffic(), false
	for _, f := range c.Families {
		if err := ctx.Err(); err != nil {
			return nil, err
		}
		table, err := tableInUse(conn, c.Table, f)
		if err == nil && table == "" {
			continue
		}
		any = true
		var counted counters
		if err == nil {
			counted, err = readCounters(conn, table, f)
		}
		if errors.Is(err, unix.ENOENT) {
			return &ruleset.Traffic{}, nil
		}
		var owners owners
		if err == nil && len(counted) != 0 {
			owners, err = readOwners(conn, table, f)
		}
		if err != nil {
			return nil, fmt.Errorf("nftables: cannot read traffic: %w", err)
		}
		counted.sum(owners, out.Services)
	}
	if !any {
		return nil, fmt.Errorf("nftables: cannot read traffic: %w", ruleset.ErrNoRules)
	}
	return out, nil
}

// tableInUse returns the name of the table that packets meet: the configured name, the name of
// the staging table, or "" if there is no such table.
func tableInUse(conn *nlbatch.Conn, name string, f tracker.Family) (string, error) {
	for _, name := range []string{name, stagingOf(name)} {
		head, err := readTable(conn, name, f)
		if err != nil {
			return "", err
		}
		if !head.exists {
			continue
		}
		request := nfnl.AppendString(nil, unix.NFTA_CHAIN_TABLE, name)
		request = nfnl.AppendString(request, unix.NFTA_CHAIN_NAME, chainNATPrerouting)
		err = conn.Get(unix.NFT_MSG_GETCHAIN, inet.AF(f), false, request, func([]byte) error { return nil })
		if !errors.Is(err, unix.ENOENT) {
			return name, err
		}
	}
	return "", nil
}

// counterKey identifies a counter: its set, and the destination in the kernel's encoding.
type counterKey struct {
	set set
	at  string
}

// counters holds the packets of the counters of one table.
type counters map[counterKey]uint64

// readCounters reads a table's counters.
func readCounters(conn *nlbatch.Conn, table string, f tracker.Family) (counters, error) {
	out := counters{}
	for _, s := range trafficSets {
		err := again(func() error {
			return readElements(conn, table, f, s.name(), func(e kernelElement) {
				counter := parse(e.expr)
				values := parse(counter[unix.NFTA_EXPR_DATA])
				out[counterKey{s, string(e.key)}] = nfnl.Uint64(values[unix.NFTA_COUNTER_PACKETS])
			})
		})
		if err = ignoreInterrupted(err); err != nil {
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
			_, _, key := frontendKey(f.Kind == ruleset.NodePort, f.Addr, s.rule.Key.Protocol, f.Port)
			out[string(key.bytes())] = s.rule.Key
		}
	}
	return out
}

// readOwners reads the Service ports from the kernel.
func readOwners(conn *nlbatch.Conn, table string, f tracker.Family) (owners, error) {
	out := owners{}
	for _, s := range []set{setServiceIPs, setNodePorts} {
		err := again(func() error {
			return readElements(conn, table, f, s.name(), func(e kernelElement) {
				if len(e.key) >= portOffset && e.comment != "" {
					out[string(e.key)] = tracker.Key{ServicePortName: parseName(e.comment, e.key[len(e.key)-portOffset]), Family: f}
				}
			})
		})
		if err = ignoreInterrupted(err); err != nil {
			return nil, err
		}
	}
	return out, nil
}

// parseName returns the Service port that a comment names.
func parseName(comment string, protocol byte) tracker.ServicePortName {
	namespace, name, _ := strings.Cut(comment, "/")
	name, port, _ := strings.Cut(name, ":")
	out := tracker.ServicePortName{NamespacedName: types.NamespacedName{Namespace: namespace, Name: name}, Port: port}
	for _, p := range []v1.Protocol{v1.ProtocolTCP, v1.ProtocolUDP, v1.ProtocolSCTP} {
		if inet.Protocol(p) == protocol {
			out.Protocol = p
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
		_, _, key := frontendKey(false, f.Addr, old.Key.Protocol, f.Port)
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
		err := again(func() error {
			list.Reset()
			return b.elements(old.name, t.family, s, func(e kernelElement) {
				if e.expr != nil && list.Count() < t.size[s] {
					list.AddCounter(e.key, e.expr)
				}
			})
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
