package inspect

import (
	"errors"
	"fmt"
	"net/netip"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/mdlayher/netlink"
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"github.com/go-proxier/proxier/internal/inet"
	"github.com/go-proxier/proxier/internal/nfnl"
	"github.com/go-proxier/proxier/internal/nfnl/tuple"
	"github.com/go-proxier/proxier/internal/nft"
	"github.com/go-proxier/proxier/ruleset"
)

// connection is what the kernel did with the first packet of a connection, and what came back.
type connection struct {
	from, to netip.AddrPort
	// lastFrom and lastTo are the addresses in the packet's last message.
	lastFrom, lastTo netip.AddrPort
	// in is the index of the interface by which the packet came in, 0 if the node sent it, or unknown. out is
	// the index of the interface by which it left, or 0.
	in, out int
	steps   []step // the rules that matched, and the policy that dropped the packet, if any
	end     end
	reply   reply

	// What describe sets: lines for the user, the action, 0 if the packet was lost or queued, and the chain of another
	// program that stopped the packet, or "".
	lines   []string
	action  ruleset.Action
	foreign string

	id   uint32    // the kernel's number of the packet
	seen time.Time // when the last message arrived
	// looping is set while the packet is on its way through the loopback interface.
	looping bool
}

// unknown is the index of an interface that is not known.
const unknown = -1

// step is a rule that matched a packet.
type step struct {
	family       uint8 // NFPROTO_*
	table, chain string
	rule         uint64 // its handle, 0 for the chain's policy
}

// end is what happened to a packet at the end.
type end uint8

const (
	lost      end = iota // in a part of the kernel that sends no messages: iptables-legacy, routing, or a limit
	sent                 // it left by an interface
	delivered            // it was for the node
	dropped              // by a rule or a chain's policy
	queued               // to a program (NFQUEUE), which has not returned it
)

// reply is what came back on a connection.
type reply uint8

const (
	answered reply = iota // by a packet other than a reset
	reset                 // a TCP endpoint refused the connection
	silent                // nothing yet
)

const (
	// flagOwner makes the kernel remove a table with its socket (linux/netfilter/nf_tables.h, NFT_TABLE_F_OWNER,
	// Linux 5.12), even after SIGKILL.
	flagOwner = 2
	// sendBuffer is more than the transaction takes.
	sendBuffer = 64 << 10
	// receiveBuffer holds the messages of a second's packets with more than a hundred steps each.
	receiveBuffer = 8 << 20

	groupNew     = 1 // NFNLGRP_CONNTRACK_NEW
	groupUpdate  = 2 // NFNLGRP_CONNTRACK_UPDATE
	groupDestroy = 3 // NFNLGRP_CONNTRACK_DESTROY
	// seenReply is IPS_SEEN_REPLY (include/uapi/linux/netfilter/nf_conntrack_common.h).
	seenReply = 1 << 1

	// loopback is the index of the loopback interface in every network namespace (LOOPBACK_IFINDEX).
	loopback = 1

	// idle is how long to wait for a packet's next message.
	idle = time.Second
)

// follower follows the first packets of new connections to a destination, in the network namespace of the calling
// thread. One socket receives the events of connection tracking and, by nftrace, a message for each rule that a
// packet matches. Chains at the hook ingress and XDP programs run before it sees a packet.
type follower struct {
	packet      ruleset.Packet // the destination, before any translation
	from        netip.AddrPort // the source; the zero address means any address, and port 0 any port
	table       string         // which marks the packets; "" if connection tracking alone shows connections
	owner       *nft.Conn      // of the table
	messages    *netlink.Conn
	packets     map[uint32]*connection         // whose outcome is open, by ID
	connections map[netip.AddrPort]*connection // by source
	done        []*connection                  // whose outcome is known, until the caller takes them
	overrun     bool                           // the kernel dropped messages
}

// follow returns a follower of connections, with its own table if marks is set. The error wraps [os.ErrPermission] without
// CAP_NET_ADMIN in the network namespace.
func follow(packet ruleset.Packet, from netip.AddrPort, marks bool) (_ *follower, err error) {
	f := &follower{packet: packet, from: from, packets: map[uint32]*connection{}, connections: map[netip.AddrPort]*connection{}}
	defer func() {
		if err != nil {
			f.close()
		}
	}()
	if f.messages, err = netlink.Dial(unix.NETLINK_NETFILTER, nil); err != nil {
		return nil, fmt.Errorf("cannot open a netlink socket: %w", err)
	}
	for _, g := range []uint32{groupNew, groupUpdate, groupDestroy, unix.NFNLGRP_NFTRACE} {
		if err := f.messages.JoinGroup(g); err != nil {
			return nil, fmt.Errorf("cannot receive the kernel's messages: %w", err)
		}
	}
	// If this fails, the default buffer is enough for a few packets.
	_ = f.messages.SetReadBuffer(receiveBuffer)
	if !marks {
		return f, nil
	}
	f.table = fmt.Sprintf("proxier-trace-%d", os.Getpid())
	if f.owner, err = nft.Dial(nil, sendBuffer); err == nil {
		err = f.install()
	}
	if err != nil {
		return nil, fmt.Errorf("cannot install the table %s: %w", f.table, err)
	}
	return f, nil
}

func (f *follower) close() {
	if f.owner != nil {
		f.owner.Close()
	}
	if f.messages != nil {
		f.messages.Close()
	}
}

// chains has the table's family and name, and the rule for both chains that mark packets, which run before any other
// chain. The last two show the final addresses of packets; only connection tracking, which confirms connections, runs
// later.
const chains = `table %[1]s %[2]s {
	chain prerouting {
		type filter hook prerouting priority -2147483648; policy accept;
		%[3]s
	}
	chain output {
		type filter hook output priority -2147483648; policy accept;
		%[3]s
	}
	chain input {
		type filter hook input priority 2147483646; policy accept;
	}
	chain postrouting {
		type filter hook postrouting priority 2147483646; policy accept;
	}
}`

// install adds the table to the kernel. The kernel removes it when the owner is closed.
func (f *follower) install() error {
	family, name := uint8(unix.NFPROTO_IPV4), "ip"
	if f.packet.To.Addr().Is6() {
		family, name = unix.NFPROTO_IPV6, "ip6"
	}
	var b nft.Batch
	b.Reset()
	b.Begin(unix.NFT_MSG_NEWTABLE, unix.NLM_F_CREATE, family)
	b.String(unix.NFTA_TABLE_NAME, f.table)
	b.Uint32(unix.NFTA_TABLE_FLAGS, flagOwner)
	b.End()
	if err := b.Script(fmt.Sprintf(chains, name, f.table, f.rule(name))); err != nil {
		return err
	}
	return f.owner.Commit(&b)
}

// rule returns the rule that marks packets of a family: at most 100 a second, so that tracing does not slow a busy
// destination down. The kernel writes some twenty messages for each packet.
func (f *follower) rule(ip string) string {
	to, from := f.packet.To, f.from
	rule := fmt.Sprintf("%s daddr == %v ", ip, netip.PrefixFrom(to.Addr(), to.Addr().BitLen()))
	if a := from.Addr(); a.IsValid() {
		rule += fmt.Sprintf("%s saddr == %v ", ip, netip.PrefixFrom(a, a.BitLen()))
	}
	rule += fmt.Sprintf("meta l4proto %s th dport %d ", strings.ToLower(string(f.packet.Protocol)), to.Port())
	if from.Port() != 0 {
		rule += fmt.Sprintf("th sport %d ", from.Port())
	}
	switch inet.Protocol(f.packet.Protocol) {
	case unix.IPPROTO_TCP:
		rule += "@th,104,8 & 0x12 == 0x2 " // SYN without ACK, RFC 9293
	case unix.IPPROTO_SCTP:
		rule += "@th,96,8 == 0x1 " // the first chunk is INIT, RFC 9260
	}
	return rule + "limit rate 100/second burst 100 packets meta nftrace set 1"
}

// receive receives messages for a tenth of a second.
func (f *follower) receive() error {
	if err := f.messages.SetReadDeadline(time.Now().Add(idle / 10)); err != nil {
		return err
	}
	for {
		list, err := f.messages.Receive()
		for _, m := range list {
			switch {
			case len(m.Data) < 4: // struct nfgenmsg
			case m.Header.Type == unix.NFNL_SUBSYS_NFTABLES<<8|unix.NFT_MSG_TRACE:
				f.step(parseMessage(m.Data[0], m.Data[4:]), time.Now())
			case m.Header.Type>>8 == unix.NFNL_SUBSYS_CTNETLINK:
				f.event(tuple.DecodeEntry(m.Data[4:]), m.Header.Type&0xff == nl.IPCTNL_MSG_CT_DELETE)
			}
		}
		switch {
		case errors.Is(err, os.ErrDeadlineExceeded):
			return nil
		case errors.Is(err, unix.ENOBUFS):
			f.overrun = true
		case err != nil:
			return fmt.Errorf("cannot receive the kernel's messages: %w", err)
		}
	}
}

// event records an event of connection tracking. If the first packet that comes back is a reset, connection tracking
// deletes the connection at that moment, and before it counts as replied to (nf_conntrack_proto_tcp.c).
func (f *follower) event(e tuple.Entry, deleted bool) {
	from, protocol := e.Sent.Src, inet.Protocol(f.packet.Protocol)
	if e.Sent.Protocol != protocol || e.Sent.Dst != f.packet.To ||
		f.from.Addr().IsValid() && f.from.Addr() != from.Addr() || f.from.Port() != 0 && f.from.Port() != from.Port() {
		return
	}
	c := f.connections[from]
	if c == nil && f.table != "" {
		return
	} else if c == nil {
		c = &connection{from: from, to: f.packet.To, lastFrom: e.Reply.Dst, lastTo: e.Reply.Src, in: unknown, reply: silent, seen: time.Now()}
		f.connections[from] = c
		f.finish(c, sent)
	}
	switch {
	case e.Status&seenReply != 0:
		c.reply = answered
	case deleted && protocol == unix.IPPROTO_TCP && c.reply == silent:
		c.reply = reset
	}
}

// message is a message about a packet that is followed (NFT_MSG_TRACE).
type message struct {
	step
	id      uint32 // of the packet
	policy  bool   // the chain's policy applied; without it and a rule, a chain ended
	verdict uint32
	in, out uint32 // interfaces' indices, 0 if none
	// from and to are the packet's addresses. Only the first message of each base chain has them.
	from, to netip.AddrPort
}

// parseMessage parses the attributes of a message about a table of a family.
func parseMessage(family uint8, attrs []byte) message {
	get := func(path ...uint16) []byte { return attribute(attrs, path...) }
	m := message{
		step:    step{family, nfnl.String(get(unix.NFTA_TRACE_TABLE)), nfnl.String(get(unix.NFTA_TRACE_CHAIN)), nfnl.Uint64(get(unix.NFTA_TRACE_RULE_HANDLE))},
		id:      nfnl.Uint32(get(unix.NFTA_TRACE_ID)),
		policy:  nfnl.Uint32(get(unix.NFTA_TRACE_TYPE)) == unix.NFT_TRACETYPE_POLICY,
		verdict: nfnl.Uint32(get(unix.NFTA_TRACE_VERDICT, unix.NFTA_VERDICT_CODE)),
		in:      nfnl.Uint32(get(unix.NFTA_TRACE_IIF)),
		out:     nfnl.Uint32(get(unix.NFTA_TRACE_OIF)),
	}
	if m.policy {
		m.rule, m.verdict = 0, nfnl.Uint32(get(unix.NFTA_TRACE_POLICY))
	}
	network, transport := get(unix.NFTA_TRACE_NETWORK_HEADER), get(unix.NFTA_TRACE_TRANSPORT_HEADER)
	at, size := 12, 4
	if len(network) > 0 && network[0]>>4 == 6 {
		at, size = 8, 16
	}
	if len(network) >= at+2*size && len(transport) >= 4 {
		from, _ := netip.AddrFromSlice(network[at : at+size])
		to, _ := netip.AddrFromSlice(network[at+size : at+2*size])
		m.from = netip.AddrPortFrom(from, nfnl.Uint16(transport[:2]))
		m.to = netip.AddrPortFrom(to, nfnl.Uint16(transport[2:4]))
	}
	return m
}

// Verdicts (include/uapi/linux/netfilter.h).
const (
	nfDrop  = 0
	nfQueue = 3
)

// step records a message that arrived at now.
func (f *follower) step(m message, now time.Time) {
	own := m.table == f.table
	c := f.packets[m.id]
	if marked := own && m.rule != 0; marked || c == nil {
		if c = f.looped(m); c == nil && marked {
			c = f.begin(m)
		}
		if c == nil {
			return
		}
	}
	c.seen = now
	headers := m.from.IsValid()
	if headers {
		c.lastFrom, c.lastTo = m.from, m.to
	}
	switch {
	case own && headers && m.chain == "postrouting":
		c.out = int(m.out)
		if c.looping = m.out == loopback; !c.looping {
			f.finish(c, sent)
		}
	case own && headers && m.chain == "input":
		f.finish(c, delivered)
	case own, m.policy && m.verdict != nfDrop, !m.policy && m.rule == 0:
	default:
		c.steps, c.end = append(c.steps, m.step), lost
		switch m.verdict & 0xff { // the upper bits are an error or a queue's number
		case nfDrop:
			f.finish(c, dropped)
		case nfQueue:
			c.end = queued // unless more messages come
		}
	}
}

// looped returns the connection whose packet left by the loopback interface and comes in again with this message,
// or nil. Some kernels give the packet a new ID.
func (f *follower) looped(m message) *connection {
	for _, c := range f.packets {
		if c.looping && m.in == loopback && c.lastFrom == m.from && c.lastTo == m.to {
			delete(f.packets, c.id)
			c.id = m.id
			f.packets[c.id] = c
			return c
		}
	}
	return nil
}

// begin returns a new connection, or nil for a later packet of one that is known.
func (f *follower) begin(m message) *connection {
	if c := f.packets[m.id]; c != nil {
		f.finish(c, lost) // the kernel reuses the ID
	}
	if f.connections[m.from] != nil {
		return nil
	}
	c := &connection{from: m.from, to: m.to, in: int(m.in), id: m.id, reply: silent}
	f.packets[m.id], f.connections[m.from] = c, c
	return c
}

func (f *follower) finish(c *connection, how end) {
	delete(f.packets, c.id)
	c.end = how
	f.done = append(f.done, c)
}

// take returns the connections whose outcome is known and was not taken yet. Without further messages, it counts as
// known after a time.
func (f *follower) take(after time.Duration) (done []*connection) {
	for _, c := range f.packets {
		if time.Since(c.seen) >= after {
			f.finish(c, c.end)
		}
	}
	done, f.done = f.done, nil
	slices.SortStableFunc(done, func(a, b *connection) int { return a.seen.Compare(b.seen) })
	return done
}
