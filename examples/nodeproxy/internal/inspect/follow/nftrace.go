//go:build linux

package follow

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"net"
	"net/netip"
	"os"
	"strings"
	"time"

	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"

	"github.com/go-proxier/proxier/internal/inet"
	"github.com/go-proxier/proxier/internal/nfnl"
	"github.com/go-proxier/proxier/internal/nft"
)

// The chains of the table, named after their hooks.
const (
	chainPrerouting  = "prerouting"
	chainOutput      = "output"
	chainInput       = "input"
	chainPostrouting = "postrouting"
)

const (
	// flagOwner makes the kernel remove a table with its socket (linux/netfilter/nf_tables.h, NFT_TABLE_F_OWNER).
	flagOwner = 2
	// sendBuffer is more than the transaction takes.
	sendBuffer = 64 << 10
)

// tableName returns the name of this process's table.
func tableName() string { return fmt.Sprintf("proxier-trace-%d", os.Getpid()) }

// install adds the table to the kernel. The kernel removes it when c is closed.
func install(c *nft.Conn, f Filter) error {
	var b nft.Batch
	b.Reset()
	t := nft.Table{Batch: &b, Family: unix.NFPROTO_IPV4, Name: tableName()}
	if f.To.Addr().Is6() {
		t.Family = unix.NFPROTO_IPV6
	}
	b.Begin(unix.NFT_MSG_NEWTABLE, unix.NLM_F_CREATE, t.Family)
	b.String(unix.NFTA_TABLE_NAME, t.Name)
	b.Uint32(unix.NFTA_TABLE_FLAGS, flagOwner)
	b.End()
	// The first two chains mark packets before any other chain. The last two show the final
	// addresses of packets; only connection tracking, which confirms connections, runs
	// later.
	for name, hook := range nft.Hooks() {
		switch name {
		case chainPrerouting, chainOutput:
			t.CreateChain(name, &nft.BaseChain{Type: "filter", Hook: hook, Priority: math.MinInt32})
			if err := t.Rule(name, 0, unix.NLM_F_APPEND, f.rule()); err != nil {
				return err
			}
		case chainInput, chainPostrouting:
			t.CreateChain(name, &nft.BaseChain{Type: "filter", Hook: hook, Priority: math.MaxInt32 - 1})
		}
	}
	return c.Commit(&b)
}

// rule returns the rule that marks packets: at most 100 a second, so that tracing does not slow a busy destination
// down. The kernel writes some twenty messages for each packet.
func (f Filter) rule() string {
	ip := "ip"
	if f.To.Addr().Is6() {
		ip = "ip6"
	}
	var b strings.Builder
	match := func(format string, args ...any) { fmt.Fprintf(&b, format+" ", args...) }
	match("%s daddr == %v", ip, netip.PrefixFrom(f.To.Addr(), f.To.Addr().BitLen()))
	if from := f.From.Addr(); from.IsValid() {
		match("%s saddr == %v", ip, netip.PrefixFrom(from, from.BitLen()))
	}
	match("meta l4proto %s th dport %d", strings.ToLower(string(inet.ProtocolOf(f.Protocol))), f.To.Port())
	if f.From.Port() != 0 {
		match("th sport %d", f.From.Port())
	}
	switch f.Protocol {
	case unix.IPPROTO_TCP:
		match("@th,104,8 & 0x12 == 0x2") // SYN without ACK, RFC 9293
	case unix.IPPROTO_SCTP:
		match("@th,96,8 == 0x1") // the first chunk is INIT, RFC 9260
	}
	match("limit rate 100/second burst 100 packets meta nftrace set 1")
	return strings.TrimSpace(b.String())
}

// nftrace is a Follower that uses the kernel's trace messages.
type nftrace struct {
	owner    *nft.Conn
	messages *netlink.Conn
	packets  assembly
	overrun  int
}

// NFTrace returns a Follower that uses the kernel's trace messages. The error wraps
// [os.ErrPermission] without CAP_NET_ADMIN in the network namespace, and
// [errors.ErrUnsupported] if the kernel has no nf_tables.
func NFTrace(f Filter) (_ Follower, err error) {
	t := &nftrace{packets: assembly{table: tableName(), packets: map[uint32]*Packet{}}}
	defer func() {
		if err != nil {
			t.Close()
		}
	}()
	lo, err := net.InterfaceByName("lo")
	if err != nil {
		return nil, err
	}
	t.packets.loopback = uint32(lo.Index)
	if t.messages, err = listen(unix.NFNLGRP_NFTRACE); err != nil {
		return nil, err
	}
	if t.owner, err = nft.Dial(nil, sendBuffer); err != nil {
		return nil, unsupported("open a netlink socket", err)
	}
	if err := install(t.owner, f); err != nil {
		return nil, unsupported("install the table "+tableName(), err)
	}
	return t, nil
}

func (t *nftrace) Close() error {
	var errs []error
	if t.owner != nil {
		errs = append(errs, t.owner.Close())
	}
	if t.messages != nil {
		errs = append(errs, t.messages.Close())
	}
	return errors.Join(errs...)
}

func (t *nftrace) Overrun() int { return t.overrun }

func (t *nftrace) Follow(ctx context.Context, fn func(*Packet) (more bool)) error {
	more := true
	t.packets.done = func(p *Packet) { more = more && fn(p) }
	err := receive(ctx, t.messages, func(list []netlink.Message, overrun bool) bool {
		if overrun {
			t.overrun++
		}
		now := time.Now()
		for _, m := range list {
			if m.Header.Type == unix.NFNL_SUBSYS_NFTABLES<<8|unix.NFT_MSG_TRACE && len(m.Data) >= 4 {
				t.packets.add(parse(m.Data[0], m.Data[4:]), now)
			}
		}
		t.packets.expire(now, idle)
		return more
	})
	t.packets.expire(time.Now(), idle/10)
	return err
}

// message is a parsed NFT_MSG_TRACE: one step of a packet.
type message struct {
	id      uint32 // of the packet
	family  uint8  // of the table, NFPROTO_*
	table   string
	chain   string
	rule    uint64 // the rule's handle, 0 at the end of a base chain
	kind    uint32 // NFT_TRACETYPE_*
	verdict int32
	policy  uint32
	in, out uint32 // interfaces' indices, 0 if none
	// from and to are the packet's addresses. Only the first message of each base chain
	// has them.
	from, to netip.AddrPort
}

// parse parses the attributes of a message, which follow its nfgenmsg header.
func parse(family uint8, attrs []byte) message {
	var a [unix.NFTA_TRACE_POLICY + 1][]byte
	for typ, data := range nfnl.Attributes(attrs) {
		if int(typ) < len(a) {
			a[typ] = data
		}
	}
	number := func(typ int) uint32 { return nfnl.Uint32(a[typ]) }
	m := message{
		id: number(unix.NFTA_TRACE_ID), family: family, table: nfnl.String(a[unix.NFTA_TRACE_TABLE]), chain: nfnl.String(a[unix.NFTA_TRACE_CHAIN]),
		rule: nfnl.Uint64(a[unix.NFTA_TRACE_RULE_HANDLE]), kind: number(unix.NFTA_TRACE_TYPE), verdict: -1,
		policy: number(unix.NFTA_TRACE_POLICY), in: number(unix.NFTA_TRACE_IIF), out: number(unix.NFTA_TRACE_OIF),
	}
	for typ, data := range nfnl.Attributes(a[unix.NFTA_TRACE_VERDICT]) {
		if typ == unix.NFTA_VERDICT_CODE {
			m.verdict = int32(nfnl.Uint32(data))
		}
	}
	m.from, m.to = addresses(a[unix.NFTA_TRACE_NETWORK_HEADER], a[unix.NFTA_TRACE_TRANSPORT_HEADER])
	return m
}

// addresses returns the source and destination of a packet. They are invalid if the headers
// are not complete.
func addresses(network, transport []byte) (from, to netip.AddrPort) {
	if len(network) == 0 || len(transport) < 4 {
		return from, to
	}
	saddr, n := 12, 4
	if network[0]>>4 == 6 {
		saddr, n = 8, 16
	}
	if len(network) < saddr+2*n {
		return from, to
	}
	addr := func(at int) netip.Addr {
		a, _ := netip.AddrFromSlice(network[at : at+n])
		return a
	}
	return netip.AddrPortFrom(addr(saddr), binary.BigEndian.Uint16(transport)),
		netip.AddrPortFrom(addr(saddr+n), binary.BigEndian.Uint16(transport[2:]))
}
