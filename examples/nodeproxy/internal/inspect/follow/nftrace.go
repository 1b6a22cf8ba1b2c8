//go:build linux

package follow

import (
	"context"
	"errors"
	"net"
	"time"

	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"

	"github.com/go-proxier/proxier/examples/internal/node/nft"
)

// nftrace is a Follower that uses the kernel's trace messages.
type nftrace struct {
	owner    *nft.Conn
	messages *netlink.Conn
	packets  assembly
	overrun  int
}

// receiveBuffer is the size of the socket's buffer in bytes. It holds the messages of a
// second's packets with more than a hundred steps each.
const receiveBuffer = 8 << 20

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
	if t.owner, err = nft.Dial(nil); err != nil {
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
	err := receive(ctx, t.messages, &t.overrun, func(list []netlink.Message) bool {
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
