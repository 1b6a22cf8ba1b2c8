//go:build linux

package follow

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"sync"
	"time"

	"github.com/mdlayher/netlink"
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"github.com/go-proxier/proxier/internal/nfnl/tuple"
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
	groupNew     = 1 // NFNLGRP_CONNTRACK_NEW
	groupUpdate  = 2 // NFNLGRP_CONNTRACK_UPDATE
	groupDestroy = 3 // NFNLGRP_CONNTRACK_DESTROY
	// seenReply is IPS_SEEN_REPLY (include/uapi/linux/netfilter/nf_conntrack_common.h).
	seenReply = 1 << 1
	// maxNew bounds the connections that wait for Follow.
	maxNew = 4096
)

// Conntrack records what comes back on connections, from the events of connection tracking. If
// the first packet that comes back is a reset, connection tracking deletes the connection
// at that moment, and before it counts as replied to (nf_conntrack_proto_tcp.c).
//
// As a [Follower] it returns new connections. Their packets have no steps, their outcome is Sent, and In is Unknown.
type Conntrack struct {
	filter   Filter
	messages *netlink.Conn
	overrun  int
	begun    chan *Packet

	mu sync.Mutex
	of map[netip.AddrPort]Reply // by source
}

// OpenConntrack returns a Conntrack that records from now on, once Run runs. It returns the same errors as
// [NFTrace].
func OpenConntrack(f Filter) (*Conntrack, error) {
	c, err := listen(groupNew, groupUpdate, groupDestroy)
	if err != nil {
		return nil, err
	}
	return &Conntrack{filter: f, messages: c, begun: make(chan *Packet, maxNew), of: map[netip.AddrPort]Reply{}}, nil
}

// Run records until the context ends.
func (r *Conntrack) Run(ctx context.Context) error {
	return receive(ctx, r.messages, func(list []netlink.Message, overrun bool) bool {
		r.mu.Lock()
		defer r.mu.Unlock()
		if overrun {
			r.overrun++
		}
		for _, m := range list {
			switch {
			case len(m.Data) < 4:
			case m.Header.Type == unix.NFNL_SUBSYS_CTNETLINK<<8|nl.IPCTNL_MSG_CT_NEW:
				r.add(m.Data[4:], false)
			case m.Header.Type == unix.NFNL_SUBSYS_CTNETLINK<<8|nl.IPCTNL_MSG_CT_DELETE:
				r.add(m.Data[4:], true)
			}
		}
		return true
	})
}

// add records an event.
func (r *Conntrack) add(attrs []byte, deleted bool) {
	e := tuple.DecodeEntry(attrs)
	sent := e.Sent
	if from := r.filter.From; sent.Protocol != r.filter.Protocol || sent.Dst != r.filter.To ||
		from.Addr().IsValid() && from.Addr() != sent.Src.Addr() || from.Port() != 0 && from.Port() != sent.Src.Port() {
		return
	}
	before, known := r.of[sent.Src]
	switch {
	case e.Status&seenReply != 0:
		r.of[sent.Src] = Answered
	case deleted && r.filter.Protocol == unix.IPPROTO_TCP && before == Silent:
		r.of[sent.Src] = Reset
	case !known:
		r.of[sent.Src] = Silent
	}
	if !known {
		select {
		case r.begun <- &Packet{From: sent.Src, To: sent.Dst, LastFrom: e.Reply.Dst, LastTo: e.Reply.Src, In: Unknown, Outcome: Sent}:
		default: // Follow does not run
		}
	}
}

// Follow implements [Follower]. Run must run.
func (r *Conntrack) Follow(ctx context.Context, fn func(*Packet) (more bool)) error {
	for {
		select {
		case p := <-r.begun:
			if !fn(p) {
				return nil
			}
		case <-ctx.Done():
			return nil
		}
	}
}

// Of returns what came back on the connection from a source.
func (r *Conntrack) Of(from netip.AddrPort) Reply {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.of[from]
}

// Overrun implements [Follower].
func (r *Conntrack) Overrun() int {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.overrun
}

// Close closes the socket. Run must have returned.
func (r *Conntrack) Close() error { return r.messages.Close() }

// receiveBuffer is the size of a socket's buffer in bytes. It holds the messages of a
// second's packets with more than a hundred steps each.
const receiveBuffer = 8 << 20

// listen returns a socket that receives the messages of groups.
func listen(groups ...uint32) (*netlink.Conn, error) {
	c, err := netlink.Dial(unix.NETLINK_NETFILTER, nil)
	if err != nil {
		return nil, unsupported("open a netlink socket", err)
	}
	for _, g := range groups {
		if err := c.JoinGroup(g); err != nil {
			c.Close()
			return nil, unsupported("receive the kernel's messages", err)
		}
	}
	// If this fails, the default buffer is enough for a few packets.
	_ = c.SetReadBuffer(receiveBuffer)
	return c, nil
}

// receive calls fn with the messages of a socket, and whether the kernel dropped some, until fn returns false or the
// context ends. Without messages it calls fn several times a second.
func receive(ctx context.Context, c *netlink.Conn, fn func(list []netlink.Message, overrun bool) (more bool)) error {
	for more := true; more && ctx.Err() == nil; {
		if err := c.SetReadDeadline(time.Now().Add(idle / 10)); err != nil {
			return err
		}
		list, err := c.Receive()
		overrun := errors.Is(err, unix.ENOBUFS)
		if err != nil && !overrun && !errors.Is(err, os.ErrDeadlineExceeded) {
			return fmt.Errorf("cannot receive the kernel's messages: %w", err)
		}
		more = fn(list, overrun)
	}
	return nil
}

// unsupported returns an error with what failed. It wraps errors.ErrUnsupported if err means
// that the kernel lacks a feature.
func unsupported(what string, err error) error {
	for _, e := range []error{unix.EPROTONOSUPPORT, unix.EOPNOTSUPP, unix.EAFNOSUPPORT, unix.EINVAL, unix.ENOENT} {
		if errors.Is(err, e) {
			return fmt.Errorf("cannot %s: %w: %w", what, errors.ErrUnsupported, err)
		}
	}
	return fmt.Errorf("cannot %s: %w", what, err)
}
