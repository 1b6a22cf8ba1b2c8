package reset

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"slices"
	"time"

	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"github.com/go-proxier/proxier/examples/internal/inetdiag"
	"github.com/go-proxier/proxier/internal/netns"
	"github.com/go-proxier/proxier/internal/nfnl"
	"github.com/go-proxier/proxier/internal/nfnl/tuple"
	"github.com/go-proxier/proxier/internal/nft"
	"github.com/go-proxier/proxier/ruleset/dataplane"
)

const (
	tableName = "proxier-reset"
	// batch is the greatest number of pairs in one transaction.
	batch = 500
	// statusDNAT is IPS_DST_NAT of include/uapi/linux/netfilter/nf_conntrack_common.h.
	statusDNAT = 1 << 5
)

// definition defines the table, as nft reads it. A key of a set is the address and port that a client connected to, of
// which the address is missing for NodePorts, and those of the endpoint. The chains come before other programs' filter
// chains (0), which may drop the packets. A connection without an answer is matched, too: its entry in connection
// tracking sends each repeated SYN to the same endpoint.
const definition = `table inet proxier-reset
flush table inet proxier-reset
table inet proxier-reset {
	set addresses-4 {
		type ipv4_addr . inet_service . ipv4_addr . inet_service
		flags timeout
	}
	set nodeports-4 {
		type inet_service . ipv4_addr . inet_service
		flags timeout
	}
	set addresses-6 {
		type ipv6_addr . inet_service . ipv6_addr . inet_service
		flags timeout
	}
	set nodeports-6 {
		type inet_service . ipv6_addr . inet_service
		flags timeout
	}
	chain forward {
		type filter hook forward priority -10; policy accept;
` + rules + `	}
	chain output {
		type filter hook output priority -10; policy accept;
` + rules + `	}
}
`

const rules = `		meta nfproto ipv4 meta l4proto tcp ct status dnat ct original ip daddr . ct original proto-dst . ip daddr . th dport @addresses-4 counter reject with tcp reset
		meta nfproto ipv4 meta l4proto tcp ct status dnat ct original proto-dst . ip daddr . th dport @nodeports-4 counter reject with tcp reset
		meta nfproto ipv6 meta l4proto tcp ct status dnat ct original ip6 daddr . ct original proto-dst . ip6 daddr . th dport @addresses-6 counter reject with tcp reset
		meta nfproto ipv6 meta l4proto tcp ct status dnat ct original proto-dst . ip6 daddr . th dport @nodeports-6 counter reject with tcp reset
`

// kernelTable is the table in a network namespace.
type kernelTable struct {
	ns   *netns.Namespace
	conn *nft.Conn
	// flows is the socket of connection tracking, for destroy.
	flows *nfnl.Conn
}

// open creates the table if it is missing.
func open(ns *os.File) (_ table, err error) {
	k := &kernelTable{}
	if k.ns, err = netns.Open(ns); err != nil {
		return nil, fmt.Errorf("reset: %w", err)
	}
	defer func() {
		if err != nil {
			k.close()
		}
	}()
	if k.conn, err = nft.Dial(k.ns.File(), 1<<20); err != nil {
		return nil, unsupported("netfilter netlink", err)
	}
	if k.flows, err = nfnl.Dial(k.ns.File()); err != nil {
		return nil, fmt.Errorf("reset: %w", err)
	}
	b, err := transaction(definition)
	if err != nil {
		return nil, fmt.Errorf("reset: %w", err)
	}
	switch err = k.conn.Commit(b); {
	case errors.Is(err, unix.EPERM):
		return nil, fmt.Errorf("reset: cannot create table %s: %w", tableName, err)
	case err != nil:
		return nil, unsupported("table with a set of concatenated keys and reject", err)
	}
	return k, nil
}

func transaction(commands string) (*nft.Batch, error) {
	b := &nft.Batch{}
	b.Reset()
	return b, b.Script(commands)
}

func unsupported(feature string, err error) error {
	return &dataplane.UnsupportedError{Backend: "reset", Feature: feature, Minimum: "Linux 4.17", Err: err}
}

// sets are the sets of the table.
var sets = [...]string{"addresses-4", "nodeports-4", "addresses-6", "nodeports-6"}

// key returns the set and the key of a pair.
func key(w pair) (set string, out []byte) {
	family := w.endpoint.Addr().BitLen() / 64 // 0 or 2
	set = sets[family+1]
	if !w.frontend.Addr().IsUnspecified() {
		set, out = sets[family], w.frontend.Addr().AsSlice()
	}
	out = append(binary.BigEndian.AppendUint16(out, w.frontend.Port()), 0, 0)
	out = append(out, w.endpoint.Addr().AsSlice()...)
	return set, append(binary.BigEndian.AppendUint16(out, w.endpoint.Port()), 0, 0)
}

// parse returns the pair of a key in one of the sets.
func parse(set int, key []byte) (w pair, ok bool) {
	n := []int{4, 4, 16, 16}[set]
	if len(key) != n*(2-set%2)+8 {
		return w, false
	}
	at := func(addr netip.Addr, port []byte) netip.AddrPort {
		return netip.AddrPortFrom(addr, binary.BigEndian.Uint16(port))
	}
	endpoint, _ := netip.AddrFromSlice(key[len(key)-4-n : len(key)-4])
	frontend := anyAddr(endpoint)
	if set%2 == 0 {
		frontend, _ = netip.AddrFromSlice(key[:n])
		key = key[n:]
	}
	return pair{at(frontend, key), at(endpoint, key[len(key)-4:])}, true
}

func (k *kernelTable) add(ctx context.Context, pairs []pair) error {
	timeout := binary.BigEndian.AppendUint64(nil, uint64(lifetime.Milliseconds()))
	return k.change(ctx, pairs, func(e *nft.Elements, key []byte) { e.AddTimed(key, nil, timeout, nil) }, unix.NFT_MSG_NEWSETELEM)
}

// remove first adds the elements: then none is missing when they are deleted.
func (k *kernelTable) remove(ctx context.Context, pairs []pair) error {
	return k.change(ctx, pairs, func(e *nft.Elements, key []byte) { e.Add(key, nil, "") }, unix.NFT_MSG_NEWSETELEM, unix.NFT_MSG_DELSETELEM)
}

// change makes a transaction of each batch of pairs, with messages of some types about the elements.
func (k *kernelTable) change(ctx context.Context, pairs []pair, encode func(e *nft.Elements, key []byte), types ...uint16) error {
	for part := range slices.Chunk(pairs, batch) {
		if err := ctx.Err(); err != nil {
			return err
		}
		sets := map[string]*nft.Elements{}
		for _, w := range part {
			set, key := key(w)
			if sets[set] == nil {
				sets[set] = &nft.Elements{}
			}
			encode(sets[set], key)
		}
		b := &nft.Batch{}
		b.Reset()
		for set, e := range sets {
			for _, typ := range types {
				var flags uint16
				if typ == unix.NFT_MSG_NEWSETELEM {
					flags = unix.NLM_F_CREATE
				}
				b.Note("elements of set " + set)
				b.Elements(typ, flags, unix.NFPROTO_INET, tableName, set, e)
			}
		}
		if err := k.conn.Commit(b); err != nil {
			return err
		}
	}
	return nil
}

// list repeats a read that another process's transaction interrupts.
func (k *kernelTable) list(ctx context.Context) (map[pair]time.Duration, error) {
	return nfnl.Whole(ctx, nfnl.ErrInterrupted, func() (map[pair]time.Duration, error) {
		out := map[pair]time.Duration{}
		for i, set := range sets {
			err := k.conn.Elements(tableName, unix.NFPROTO_INET, set, func(e nft.Element) {
				if w, ok := parse(i, e.Key); ok {
					out[w] = time.Duration(nfnl.Uint64(e.Expiration)) * time.Millisecond
				}
			})
			if err != nil {
				return nil, err
			}
		}
		return out, nil
	})
}

// connected has the states of sockets that have a connection, without TIME_WAIT, by number (include/net/tcp_states.h).
const connected = 1<<1 | 1<<2 | 1<<3 | 1<<4 | 1<<5 | 1<<8 | 1<<9 | 1<<11

// destroy looks up the sockets whose destination may be a Service's address in connection tracking.
func (k *kernelTable) destroy(ctx context.Context, to func(netip.AddrPort) bool, wanted func(pair) bool) (n int, err error) {
	err = k.ns.Do(func() error {
		var sockets []inetdiag.Socket
		for _, family := range []byte{unix.AF_INET, unix.AF_INET6} {
			err := inetdiag.List(unix.IPPROTO_TCP, family, connected, func(s inetdiag.Socket) {
				if to(s.Remote()) {
					sockets = append(sockets, s)
				}
			})
			if errors.Is(err, unix.ENOENT) {
				return fmt.Errorf("%w (CONFIG_INET_TCP_DIAG)", unix.EOPNOTSUPP)
			}
			if err != nil {
				return err
			}
		}
		for _, s := range sockets {
			c, err := k.lookUp(ctx, s.Local(), s.Remote())
			if err != nil {
				return err
			}
			if !slices.ContainsFunc(c.pairs(), wanted) {
				continue
			}
			switch err := s.Destroy(); {
			case err == nil:
				n++
			case !errors.Is(err, unix.ENOENT): // ENOENT: it was closed
				return err
			}
		}
		return nil
	})
	return n, err
}

// lookUp returns the connection of a socket, or the zero connection if it is not tracked.
func (k *kernelTable) lookUp(ctx context.Context, local, remote netip.AddrPort) (c connection, err error) {
	family := uint8(unix.NFPROTO_IPV4)
	if remote.Addr().Is6() {
		family = unix.NFPROTO_IPV6
	}
	err = k.flows.Get(ctx, nfnl.Request{
		Subsystem: unix.NFNL_SUBSYS_CTNETLINK, Type: nl.IPCTNL_MSG_CT_GET, Family: family,
		Attrs: tuple.Append(nil, nl.CTA_TUPLE_ORIG, unix.IPPROTO_TCP, local, remote),
	}, func(attrs []byte) error {
		e := tuple.DecodeEntry(attrs)
		c = connection{e.Sent.Dst, e.Reply.Src, e.Status&statusDNAT != 0}
		return nil
	})
	if errors.Is(err, unix.ENOENT) {
		err = nil
	}
	return c, err
}

func (k *kernelTable) close() error {
	var err error
	if k.conn != nil {
		err = k.conn.Close()
	}
	if k.flows != nil {
		err = errors.Join(err, k.flows.Close())
	}
	return errors.Join(err, k.ns.Close())
}

// cleanup writes nothing if there is no table: other programs follow each transaction.
func cleanup(_ context.Context, ns *os.File) error {
	conn, err := nft.Dial(ns, 0)
	if err != nil {
		return fmt.Errorf("reset: %w", err)
	}
	defer conn.Close()
	switch head, err := conn.Table(tableName, unix.NFPROTO_INET); {
	case errors.Is(err, unix.EPERM):
		return fmt.Errorf("reset: cannot look for table %s: %w", tableName, err)
	case err != nil:
		return unsupported("nf_tables", err)
	case !head.Exists:
		return nil
	}
	// There must be one to delete.
	b, err := transaction("table inet " + tableName + "\ndelete table inet " + tableName)
	if err != nil {
		return fmt.Errorf("reset: %w", err)
	}
	if err := conn.Commit(b); err != nil {
		return fmt.Errorf("reset: cannot remove table %s: %w", tableName, err)
	}
	return nil
}
