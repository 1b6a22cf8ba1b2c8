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
	// batch is the greatest number of pairs in one transaction.
	batch = 500
)

const (
	statusDNAT     = 1 << 5 // IPS_DST_NAT (nf_conntrack_common.h)
	transportBytes = 4      // of an element: a port, padded
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

// family describes the sets of one address family.
type family struct {
	bytes uint32 // of an address
	any   netip.Addr
	names [2]string // set of addresses, set of NodePorts
	diag  byte
}

func families() []family {
	return []family{
		{4, netip.IPv4Unspecified(), [2]string{"addresses-4", "nodeports-4"}, unix.AF_INET},
		{16, netip.IPv6Unspecified(), [2]string{"addresses-6", "nodeports-6"}, unix.AF_INET6},
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
	b, err := transaction(definition)
	if err != nil {
		return fmt.Errorf("reset: %w", err)
	}
	if err := k.conn.Commit(b); err != nil {
		if errors.Is(err, unix.EPERM) {
			return fmt.Errorf("reset: cannot create table %s: %w", tableName, err)
		}
		return unsupported("table with a set of concatenated keys and reject", err)
	}
	return nil
}

func transaction(commands string) (*nft.Batch, error) {
	b := &nft.Batch{}
	b.Reset()
	return b, b.Script(commands)
}

func unsupported(feature string, err error) error {
	return &dataplane.UnsupportedError{Backend: "reset", Feature: feature, Minimum: "Linux 4.17", Err: err}
}

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
		e := tuple.DecodeEntry(attrs)
		c, ok = connection{e.Sent.Dst, e.Reply.Src, e.Status&statusDNAT != 0}, e.Sent.Protocol == unix.IPPROTO_TCP
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
