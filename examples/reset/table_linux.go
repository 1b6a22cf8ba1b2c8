package reset

import (
	"bytes"
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

	"github.com/go-proxier/proxier/internal/netns"
	"github.com/go-proxier/proxier/internal/nfnl"
	"github.com/go-proxier/proxier/internal/nfnl/tuple"
	"github.com/go-proxier/proxier/internal/nft"
	"github.com/go-proxier/proxier/ruleset/dataplane"
)

const (
	tableName = "proxier-reset"
	// priority is that of the chains, before other programs' filter chains (0), which may
	// drop the packets.
	priority = -10
	// batch is the greatest number of elements in one transaction. They fit in one attribute,
	// whose length has 16 bits.
	batch = 500
)

const (
	statusDNAT     = 1 << 5 // IPS_DST_NAT (nf_conntrack_common.h)
	transportBytes = 4      // of an element: a port, padded
)

// Values that golang.org/x/sys/unix lacks. Source: include/uapi/linux/netfilter/nf_tables.h.
const (
	setConcat     = 0x80 // NFT_SET_CONCAT
	descConcat    = 2    // NFTA_SET_DESC_CONCAT
	descFieldSize = 1    // NFTA_SET_FIELD_LEN
)

// dataType is a type by which the nft tool prints a part of a key. Source: its
// include/datatype.h.
type dataType struct{ number, bytes uint32 }

var (
	typeIPv4 = dataType{7, 4}
	typeIPv6 = dataType{8, 16}
	typePort = dataType{13, 2}
)

// typeBits is the number of bits of each type in the number of a concatenation
// (TYPE_BITS in nft's include/datatype.h).
const typeBits = 6

// family describes the sets of one address family.
type family struct {
	nfproto byte
	bytes   uint32 // of an address
	word    string // of nft
	typ     dataType
	any     netip.Addr
	names   [2]string // set of addresses, set of NodePorts
	diag    byte
}

func families() []family {
	return []family{
		{unix.NFPROTO_IPV4, 4, "ip", typeIPv4, netip.IPv4Unspecified(), [2]string{"addresses-4", "nodeports-4"}, unix.AF_INET},
		{unix.NFPROTO_IPV6, 16, "ip6", typeIPv6, netip.IPv6Unspecified(), [2]string{"addresses-6", "nodeports-6"}, unix.AF_INET6},
	}
}

// kernelTable is the table in a network namespace.
type kernelTable struct {
	ns   *netns.Namespace
	conn *nft.Conn
	// flows is the socket of connection tracking, for destroy and connections.
	flows *nfnl.Conn
}

// open creates the table if it is missing.
func open(ns *os.File) (table, error) {
	k := &kernelTable{}
	var err error
	if k.ns, err = netns.Open(ns); err != nil {
		return nil, fmt.Errorf("reset: %w", err)
	}
	if err = k.open(); err != nil {
		return nil, errors.Join(err, k.close())
	}
	return k, nil
}

func (k *kernelTable) open() error {
	var err error
	if k.conn, err = nft.Dial(k.ns.File(), 1<<20); err != nil {
		return unsupported("netfilter netlink", err)
	}
	if k.flows, err = nfnl.Dial(k.ns.File()); err != nil {
		return fmt.Errorf("reset: %w", err)
	}
	t, b := transaction()
	t.Create()
	chains := map[string]uint32{"forward": unix.NF_INET_FORWARD, "output": unix.NF_INET_LOCAL_OUT}
	for chain, hook := range chains {
		t.Chain(chain, nfnl.Hook{Type: "filter", Number: hook, Priority: priority})
		t.Flush(chain)
	}
	for i, f := range families() {
		key := []dataType{f.typ, typePort, f.typ, typePort}
		for j, set := range f.names {
			newSet(b, set, uint32(2*i+j+1), key[j:])
			for chain := range chains {
				rule, err := nft.Compile(f.nfproto, f.rule(j == 1), nil)
				if err != nil {
					return fmt.Errorf("reset: %w", err)
				}
				t.Rule(chain, rule)
			}
		}
	}
	if err := k.conn.Commit(b); err != nil {
		if errors.Is(err, unix.EPERM) {
			return fmt.Errorf("reset: cannot create table %s: %w", tableName, err)
		}
		return unsupported("table with a set of concatenated keys and reject", err)
	}
	return nil
}

// transaction returns an empty transaction and the table that it is about.
func transaction() (nfnl.Table, *nft.Batch) {
	b := &nft.Batch{}
	b.Reset()
	return nfnl.Table{Batch: &b.Batch, Family: unix.NFPROTO_INET, Name: tableName}, b
}

// newSet creates a set if it is missing. Its elements have keys of several types, and
// expire. The kernel needs an ID of the set within the transaction, but rules use the name.
func newSet(b *nft.Batch, name string, id uint32, key []dataType) {
	var number, bytes uint32
	for _, t := range key {
		number = number<<typeBits | t.number
		bytes += uint32(nfnl.Align(int(t.bytes)))
	}
	b.Note("create set " + name)
	b.Begin(unix.NFT_MSG_NEWSET, unix.NLM_F_CREATE, unix.NFPROTO_INET)
	b.String(unix.NFTA_SET_TABLE, tableName)
	b.String(unix.NFTA_SET_NAME, name)
	b.Uint32(unix.NFTA_SET_ID, id)
	b.Uint32(unix.NFTA_SET_FLAGS, unix.NFT_SET_TIMEOUT|setConcat)
	b.Uint32(unix.NFTA_SET_KEY_TYPE, number)
	b.Uint32(unix.NFTA_SET_KEY_LEN, bytes)
	b.Nest(unix.NFTA_SET_DESC)
	b.Nest(descConcat)
	for _, t := range key {
		b.Nest(unix.NFTA_LIST_ELEM)
		b.Uint32(descFieldSize, t.bytes)
		b.Unnest()
	}
	b.Unnest()
	b.Unnest()
	b.End()
}

func unsupported(feature string, err error) error {
	return &dataplane.UnsupportedError{Backend: "reset", Feature: feature, Minimum: "Linux 4.17", Err: err}
}

// rule returns the rule that looks up a packet in the set of addresses or of NodePorts. A connection without an answer is
// matched, too: its entry in connection tracking sends each repeated SYN to the same endpoint.
func (f family) rule(nodePorts bool) string {
	set, address := f.names[1], ""
	if !nodePorts {
		set, address = f.names[0], "ct original "+f.word+" daddr . "
	}
	return fmt.Sprintf("meta nfproto ipv%s meta l4proto tcp ct status dnat %sct original proto-dst . %s daddr . th dport @%s counter reject with tcp reset",
		f.names[0][len(f.names[0])-1:], address, f.word, set)
}

// key returns the set and the key of a pair.
func key(w pair) (set string, out []byte) {
	f := families()[0]
	if w.endpoint.Addr().Is6() {
		f = families()[1]
	}
	set = f.names[1]
	if w.frontend.Addr() != f.any {
		set = f.names[0]
		out = append(out, w.frontend.Addr().AsSlice()...)
	}
	out = append(binary.BigEndian.AppendUint16(out, w.frontend.Port()), 0, 0)
	out = append(out, w.endpoint.Addr().AsSlice()...)
	return set, append(binary.BigEndian.AppendUint16(out, w.endpoint.Port()), 0, 0)
}

// parse returns the pair of a key in the set of addresses, or of NodePorts.
func (f family) parse(key []byte, nodePort bool) (w pair, ok bool) {
	n := int(f.bytes)
	want := 2*n + 2*transportBytes
	if nodePort {
		want -= n
	}
	if len(key) != want {
		return w, false
	}
	at := f.any
	if !nodePort {
		at, _ = netip.AddrFromSlice(key[:n])
		key = key[n:]
	}
	endpoint, _ := netip.AddrFromSlice(key[transportBytes : transportBytes+n])
	w.frontend = netip.AddrPortFrom(at, binary.BigEndian.Uint16(key))
	w.endpoint = netip.AddrPortFrom(endpoint, binary.BigEndian.Uint16(key[transportBytes+n:]))
	return w, true
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
		_, b := transaction()
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
		for _, f := range families() {
			for i, set := range f.names {
				err := k.conn.Elements(tableName, unix.NFPROTO_INET, set, func(e nft.Element) {
					if w, ok := f.parse(e.Key, i == 1); ok {
						out[w] = time.Duration(nfnl.Uint64(e.Expiration)) * time.Millisecond
					}
				})
				if err != nil {
					return nil, err
				}
			}
		}
		return out, nil
	})
}

// decode returns the connection of an entry of connection tracking. ok is false if the entry is of
// another protocol.
func decode(attrs []byte) (c connection, ok bool) {
	for kind, value := range nfnl.Attributes(attrs) {
		switch kind {
		case nl.CTA_TUPLE_ORIG:
			t := tuple.Decode(value)
			c.original, ok = t.Dst, t.Protocol == unix.IPPROTO_TCP
		case nl.CTA_TUPLE_REPLY:
			c.endpoint = tuple.Decode(value).Src
		case nl.CTA_STATUS:
			c.translated = nfnl.Uint32(value)&statusDNAT != 0
		}
	}
	return c, ok
}

// socket holds the addresses of a local socket.
type socket struct{ local, remote netip.AddrPort }

// destroy looks up the sockets whose destination may be a Service's address in connection tracking.
func (k *kernelTable) destroy(ctx context.Context, to func(netip.AddrPort) bool, wanted func(pair) bool) (n int, err error) {
	for _, f := range families() {
		sockets, err := k.sockets(f, to)
		if err != nil {
			return n, err
		}
		for _, s := range sockets {
			if err := ctx.Err(); err != nil {
				return n, err
			}
			c, ok, err := k.lookUp(ctx, s)
			if err != nil {
				return n, err
			}
			if !ok || !slices.ContainsFunc(c.pairs(), wanted) {
				continue
			}
			switch err := k.destroySocket(s); {
			case err == nil:
				n++
			case !errors.Is(err, unix.ENOENT): // ENOENT: it was closed
				return n, err
			}
		}
	}
	return n, nil
}

// lookUp returns the connection of a socket. ok is false if it is not tracked.
func (k *kernelTable) lookUp(ctx context.Context, s socket) (c connection, ok bool, err error) {
	family := uint8(unix.NFPROTO_IPV4)
	if s.remote.Addr().Is6() {
		family = unix.NFPROTO_IPV6
	}
	err = k.flows.Get(ctx, nfnl.Request{
		Subsystem: unix.NFNL_SUBSYS_CTNETLINK, Type: nl.IPCTNL_MSG_CT_GET, Family: family,
		Attrs: tuple.Append(nil, nl.CTA_TUPLE_ORIG, unix.IPPROTO_TCP, s.local, s.remote),
	}, func(attrs []byte) error {
		c, ok = decode(attrs)
		return nil
	})
	if errors.Is(err, unix.ENOENT) {
		return c, false, nil
	}
	return c, ok, err
}

// Offsets in struct inet_diag_req_v2 and struct inet_diag_msg of include/uapi/linux/inet_diag.h, and
// the states of sockets that have a connection (include/net/tcp_states.h), without TIME_WAIT.
const (
	reqStates = 4
	reqSize   = 56
	msgPorts  = 4
	msgSource = 8
	msgTarget = 24
	msgSize   = 72
	connected = 1<<1 | 1<<2 | 1<<3 | 1<<4 | 1<<5 | 1<<8 | 1<<9 | 1<<11
)

// sockets returns the sockets of a family for whose destination to returns true. Sockets of IPv6 may
// have IPv4 addresses.
func (k *kernelTable) sockets(f family, to func(netip.AddrPort) bool) (out []socket, err error) {
	req := make([]byte, reqSize)
	req[0], req[1] = f.diag, unix.IPPROTO_TCP
	binary.NativeEndian.PutUint32(req[reqStates:], connected)
	err = k.ns.Do(func() error {
		r := nl.NewNetlinkRequest(nl.SOCK_DIAG_BY_FAMILY, unix.NLM_F_DUMP)
		r.AddRawData(req)
		return r.ExecuteIter(unix.NETLINK_INET_DIAG, nl.SOCK_DIAG_BY_FAMILY, func(m []byte) bool {
			if len(m) < msgSize {
				return true
			}
			at := func(addr, port int) netip.AddrPort {
				a, _ := netip.AddrFromSlice(m[addr : addr+int(f.bytes)])
				return netip.AddrPortFrom(a.Unmap(), binary.BigEndian.Uint16(m[port:]))
			}
			if s := (socket{at(msgSource, msgPorts), at(msgTarget, msgPorts+2)}); to(s.remote) {
				out = append(out, s)
			}
			return true
		})
	})
	if errors.Is(err, unix.ENOENT) {
		err = fmt.Errorf("%w (CONFIG_INET_TCP_DIAG)", unix.EOPNOTSUPP)
	}
	return out, err
}

// destroySocket ends the connection of the socket with these addresses. The library's
// SocketDestroy knows IPv4 alone. Source: include/uapi/linux/inet_diag.h (struct
// inet_diag_req_v2) and net/ipv4/inet_diag.c.
func (k *kernelTable) destroySocket(s socket) error {
	const (
		ports   = 8 // offset of idiag_sport in the request
		sources = 12
		targets = 28
		cookies = 48
	)
	req := make([]byte, reqSize)
	req[0], req[1] = unix.AF_INET, unix.IPPROTO_TCP
	if s.remote.Addr().Is6() {
		req[0] = unix.AF_INET6
	}
	binary.BigEndian.PutUint16(req[ports:], s.local.Port())
	binary.BigEndian.PutUint16(req[ports+2:], s.remote.Port())
	copy(req[sources:targets], s.local.Addr().AsSlice())
	copy(req[targets:], s.remote.Addr().AsSlice())
	copy(req[cookies:], bytes.Repeat([]byte{0xff}, reqSize-cookies)) // INET_DIAG_NOCOOKIE
	return k.ns.Do(func() error {
		r := nl.NewNetlinkRequest(nl.SOCK_DESTROY, unix.NLM_F_ACK)
		r.AddRawData(req)
		_, err := r.Execute(unix.NETLINK_INET_DIAG, 0)
		return err
	})
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
	t, b := transaction()
	t.Create() // there must be one to delete
	t.Delete()
	if err := conn.Commit(b); err != nil {
		return fmt.Errorf("reset: cannot remove table %s: %w", tableName, err)
	}
	return nil
}
