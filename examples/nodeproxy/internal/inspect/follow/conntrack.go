//go:build linux

package follow

import (
	"context"
	"net/netip"

	"github.com/mdlayher/netlink"
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"github.com/go-proxier/proxier/examples/internal/node/nft"
)

const groupNew = 1 // NFNLGRP_CONNTRACK_NEW

// events follows packets by the events of connection tracking.
type events struct {
	filter   Filter
	messages *netlink.Conn
	overrun  int
}

// Conntrack returns a Follower that uses the events of connection tracking. Its packets have
// no steps, their outcome is Sent, and In is Unknown. It returns the same errors as
// [NFTrace].
func Conntrack(f Filter) (Follower, error) {
	c, err := listen(groupNew)
	if err != nil {
		return nil, err
	}
	return &events{filter: f, messages: c}, nil
}

func (e *events) Overrun() int { return e.overrun }

func (e *events) Close() error { return e.messages.Close() }

func (e *events) Follow(ctx context.Context, fn func(*Packet) (more bool)) error {
	return receive(ctx, e.messages, &e.overrun, func(list []netlink.Message) bool {
		for _, m := range list {
			if m.Header.Type != unix.NFNL_SUBSYS_CTNETLINK<<8|nl.IPCTNL_MSG_CT_NEW || len(m.Data) < 4 {
				continue
			}
			if p := e.filter.packet(m.Data[4:]); p != nil && !fn(p) {
				return false
			}
		}
		return true
	})
}

// tuple is one direction of a connection.
type tuple struct {
	protocol uint8
	src, dst netip.AddrPort
}

// packet returns the packet of an event, or nil if the filter does not match it.
func (f Filter) packet(attrs []byte) *Packet {
	var sent, reply tuple
	for typ, data := range nft.Attributes(attrs) {
		switch typ {
		case nl.CTA_TUPLE_ORIG:
			sent = parseTuple(data)
		case nl.CTA_TUPLE_REPLY:
			reply = parseTuple(data)
		}
	}
	from := f.From
	if sent.protocol != f.Protocol || sent.dst != f.To ||
		from.Addr().IsValid() && from.Addr() != sent.src.Addr() || from.Port() != 0 && from.Port() != sent.src.Port() {
		return nil
	}
	return &Packet{From: sent.src, To: sent.dst, LastFrom: reply.dst, LastTo: reply.src, In: Unknown, Outcome: Sent}
}

func parseTuple(b []byte) (t tuple) {
	var src, dst netip.Addr
	var sport, dport uint16
	for typ, data := range nft.Attributes(b) {
		for inner, data := range nft.Attributes(data) {
			switch {
			case typ == nl.CTA_TUPLE_IP && (inner == nl.CTA_IP_V4_SRC || inner == nl.CTA_IP_V6_SRC):
				src, _ = netip.AddrFromSlice(data)
			case typ == nl.CTA_TUPLE_IP && (inner == nl.CTA_IP_V4_DST || inner == nl.CTA_IP_V6_DST):
				dst, _ = netip.AddrFromSlice(data)
			case typ == nl.CTA_TUPLE_PROTO && inner == nl.CTA_PROTO_NUM && len(data) == 1:
				t.protocol = data[0]
			case typ == nl.CTA_TUPLE_PROTO && inner == nl.CTA_PROTO_SRC_PORT:
				sport = uint16(nft.Uint(data))
			case typ == nl.CTA_TUPLE_PROTO && inner == nl.CTA_PROTO_DST_PORT:
				dport = uint16(nft.Uint(data))
			}
		}
	}
	t.src, t.dst = netip.AddrPortFrom(src, sport), netip.AddrPortFrom(dst, dport)
	return t
}
