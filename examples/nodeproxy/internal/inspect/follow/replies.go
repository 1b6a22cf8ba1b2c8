//go:build linux

package follow

import (
	"context"
	"encoding/binary"
	"net/netip"
	"sync"

	"github.com/mdlayher/netlink"
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"github.com/go-proxier/proxier/examples/internal/node/nft"
)

// Reply is what came back on a connection.
type Reply uint8

// The replies.
const (
	// Silent means that nothing came back yet.
	Silent Reply = iota
	// Answered means that a packet came back, other than a reset.
	Answered
	// Reset means that a TCP endpoint refused the connection.
	Reset
)

const (
	groupUpdate  = 2 // NFNLGRP_CONNTRACK_UPDATE
	groupDestroy = 3 // NFNLGRP_CONNTRACK_DESTROY
	// seenReply is IPS_SEEN_REPLY (include/uapi/linux/netfilter/nf_conntrack_common.h).
	seenReply = 1 << 1
)

// Replies records what comes back on connections, from the events of connection tracking. If
// the first packet that comes back is a reset, connection tracking deletes the connection
// at that moment, and before it counts as replied to (nf_conntrack_proto_tcp.c).
type Replies struct {
	filter   Filter
	messages *netlink.Conn
	overrun  int

	mu sync.Mutex
	of map[netip.AddrPort]Reply // by source
}

// WatchReplies returns a Replies that records from now on, once Run runs.
func WatchReplies(f Filter) (*Replies, error) {
	c, err := listen(groupNew)
	if err != nil {
		return nil, err
	}
	for _, g := range []uint32{groupUpdate, groupDestroy} {
		if err := c.JoinGroup(g); err != nil {
			c.Close()
			return nil, unsupported("receive the kernel's messages", err)
		}
	}
	return &Replies{filter: f, messages: c, of: map[netip.AddrPort]Reply{}}, nil
}

// Run records until the context ends.
func (r *Replies) Run(ctx context.Context) error {
	return receive(ctx, r.messages, &r.overrun, func(list []netlink.Message) bool {
		r.mu.Lock()
		defer r.mu.Unlock()
		for _, m := range list {
			if len(m.Data) >= 4 {
				r.add(m.Header.Type, m.Data[4:])
			}
		}
		return true
	})
}

// add records a message.
func (r *Replies) add(kind netlink.HeaderType, attrs []byte) {
	deleted := kind == unix.NFNL_SUBSYS_CTNETLINK<<8|nl.IPCTNL_MSG_CT_DELETE
	if !deleted && kind != unix.NFNL_SUBSYS_CTNETLINK<<8|nl.IPCTNL_MSG_CT_NEW {
		return
	}
	p := r.filter.packet(attrs)
	if p == nil {
		return
	}
	var status uint32
	for typ, data := range nft.Attributes(attrs) {
		if typ == nl.CTA_STATUS && len(data) == 4 {
			status = binary.BigEndian.Uint32(data)
		}
	}
	switch {
	case status&seenReply != 0:
		r.of[p.From] = Answered
	case deleted && r.filter.Protocol == unix.IPPROTO_TCP && r.of[p.From] == Silent:
		r.of[p.From] = Reset
	}
}

// Of returns what came back on the connection from a source.
func (r *Replies) Of(from netip.AddrPort) Reply {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.of[from]
}

// Close closes the socket. Run must have returned.
func (r *Replies) Close() error { return r.messages.Close() }
