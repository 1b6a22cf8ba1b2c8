package conntrack

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/go-proxier/proxier/internal/nfsocket"
	"github.com/go-proxier/proxier/tracker"
)

const (
	// bufferSize holds any message of a dump: the kernel fills at most 32 KiB at a
	// time (netlink_recvmsg in net/netlink/af_netlink.c).
	bufferSize = 32 << 10
	// deleteBatch is how many deletions are sent at once. Their acknowledgements
	// must fit a socket's default receive buffer, which has room for about 200.
	deleteBatch = 64
	// answerTimeout is how long the kernel has for an answer. It gives one before
	// the request's send returns, so this only guards against its never coming.
	answerTimeout = 10 * time.Second
)

// kernel is the kernel's table in one network namespace, over
// NETLINK_NETFILTER. It decodes flows as they come and keeps none.
type kernel struct {
	sock  *nfsocket.Socket
	zones []uint16 // what Dump reports; empty for zone 0 alone
	seq   uint32
	buf   []byte
	// route is nil while it is to be opened anew.
	route *netlink.Handle
}

func openKernel(netns int, zones ...uint16) (closingTable, error) {
	sock, err := nfsocket.Dial(netns)
	if errors.Is(err, unix.EPROTONOSUPPORT) {
		return nil, &NotSupportedError{Feature: "nfnetlink (CONFIG_NETFILTER_NETLINK)", Err: err}
	}
	if err != nil {
		return nil, fmt.Errorf("conntrack: %w", err)
	}
	k := &kernel{sock: sock, zones: slices.Clone(zones), buf: make([]byte, bufferSize)}
	if err = k.configure(); err == nil {
		err = k.openRoute()
	}
	if err == nil {
		err = k.probe()
	}
	if err != nil {
		k.Close()
		return nil, err
	}
	return k, nil
}

// configure makes the socket's settings.
func (k *kernel) configure() error {
	timeout := unix.NsecToTimeval(answerTimeout.Nanoseconds())
	if err := unix.SetsockoptTimeval(k.sock.FD(), unix.SOL_SOCKET, unix.SO_RCVTIMEO, &timeout); err != nil {
		return fmt.Errorf("conntrack: set receive timeout: %w", err)
	}
	return nil
}

// openRoute opens the socket that addresses are asked for by, if it is not open.
func (k *kernel) openRoute() error {
	if k.route != nil {
		return nil
	}
	return k.sock.Within(func() (err error) {
		if k.route, err = netlink.NewHandle(unix.NETLINK_ROUTE); err != nil {
			return fmt.Errorf("conntrack: open route socket: %w", err)
		}
		return nil
	})
}

// renew opens the netfilter socket anew if it was lost.
func (k *kernel) renew() error {
	if !k.sock.Lost() {
		return nil
	}
	if err := k.sock.Redial(); err != nil {
		return err
	}
	return k.configure()
}

// probe asks for the number of entries, to see whether anybody answers.
func (k *kernel) probe() error {
	k.seq++
	req := endMessage(beginMessage(nil, ctGetStats, flagRequest|flagAck, k.seq, unix.AF_UNSPEC), 0)
	err := k.exchange(context.Background(), req, 1, func(m message) (bool, error) {
		return m.kind == nlmError, m.err()
	})
	switch {
	case errors.Is(err, unix.EINVAL), errors.Is(err, unix.EOPNOTSUPP):
		// What nfnetlink says of a subsystem that is not there.
		return &NotSupportedError{Feature: "conntrack over netlink (CONFIG_NF_CT_NETLINK)", Err: err}
	case err != nil:
		return fmt.Errorf("conntrack: ask for conntrack statistics: %w", err)
	}
	return nil
}

// Close closes the sockets.
func (k *kernel) Close() error {
	if k.route != nil {
		k.route.Close()
	}
	return k.sock.Close()
}

// Dump implements [Table].
func (k *kernel) Dump(ctx context.Context, family tracker.Family, f func(*Flow)) error {
	k.seq++
	d := dump{see: f, zones: k.zones}
	err := k.exchange(ctx, dumpRequest(k.seq, family, k.zones), 1, d.take)
	if err = d.result(err); err != nil {
		return fmt.Errorf("dump: %w", err)
	}
	return nil
}

// Delete implements [Table]. Flows that cannot be deleted do not keep the others
// from it.
func (k *kernel) Delete(ctx context.Context, flows []Flow) (int, error) {
	deleted := 0
	var refused error
	var req []byte
	for len(flows) > 0 {
		batch := flows[:min(len(flows), deleteBatch)]
		flows = flows[len(batch):]
		req = req[:0]
		first := k.seq + 1
		for i := range batch {
			k.seq++
			req = appendDelete(req, k.seq, &batch[i])
		}
		err := k.exchange(ctx, req, len(batch), func(m message) (bool, error) {
			err := m.err()
			switch {
			case m.kind != nlmError || errors.Is(err, ErrMalformed):
				return false, err
			case err == nil:
				deleted++
			case errors.Is(err, unix.ENOENT): // it ended by itself
			case refused == nil:
				f := &batch[m.seq-first]
				refused = fmt.Errorf("delete flow from %v to %v: %w", f.Src, f.Dst, err)
			}
			return true, nil
		})
		if err != nil {
			return deleted, fmt.Errorf("delete: %w", err)
		}
	}
	return deleted, refused
}

// exchange sends requests, the last of which is numbered k.seq, and gives the
// answers to f until it has said that so many of them were the last of theirs, or
// an error.
func (k *kernel) exchange(ctx context.Context, req []byte, answers int, f func(message) (last bool, err error)) error {
	if err := k.renew(); err != nil {
		return err
	}
	if err := k.drain(ctx); err != nil {
		return err
	}
	first := k.seq - uint32(answers) + 1
	if err := k.send(req); err != nil {
		return err
	}
	for answers > 0 {
		if err := ctx.Err(); err != nil {
			return err
		}
		b, err := k.receive(0)
		switch {
		case errors.Is(err, unix.ENOBUFS):
			return fmt.Errorf("%w: %w", ErrIncomplete, err)
		case errors.Is(err, unix.EAGAIN):
			return fmt.Errorf("no answer in %v: %w", answerTimeout, err)
		case err != nil:
			return err
		}
		for len(b) > 0 {
			var m message
			if m, b, err = nextMessage(b); err != nil {
				return err
			}
			if m.seq-first > k.seq-first {
				continue // an answer to something given up
			}
			last, err := f(m)
			if err != nil {
				return err
			}
			if last {
				answers--
			}
		}
	}
	return nil
}

// drain takes in what is left of an exchange that was given up. The kernel makes
// no second dump on a socket before the first was read to its end.
func (k *kernel) drain(ctx context.Context) error {
	for {
		if err := ctx.Err(); err != nil {
			return err
		}
		switch _, err := k.receive(unix.MSG_DONTWAIT); {
		case errors.Is(err, unix.EAGAIN):
			return nil
		case err != nil && !errors.Is(err, unix.ENOBUFS) && !errors.Is(err, ErrMalformed):
			return err
		}
	}
}

func (k *kernel) send(req []byte) error {
	for {
		err := unix.Sendto(k.sock.FD(), req, 0, &unix.SockaddrNetlink{Family: unix.AF_NETLINK})
		if !errors.Is(err, unix.EINTR) {
			return err
		}
	}
}

// receive returns what the kernel sent next. It is valid until the next call.
func (k *kernel) receive(flags int) ([]byte, error) {
	for {
		n, _, got, from, err := unix.Recvmsg(k.sock.FD(), k.buf, nil, flags)
		if errors.Is(err, unix.EINTR) {
			continue
		}
		if err != nil {
			return nil, err
		}
		if got&unix.MSG_TRUNC != 0 {
			return nil, fmt.Errorf("%w: longer than %d bytes", ErrMalformed, len(k.buf))
		}
		if a, ok := from.(*unix.SockaddrNetlink); ok && a.Pid == 0 {
			return k.buf[:n], nil
		}
		// Not from the kernel: other processes may send to this socket too.
	}
}

// LocalAddrs implements [Table].
func (k *kernel) LocalAddrs(ctx context.Context, family tracker.Family) ([]netip.Addr, error) {
	if err := k.openRoute(); err != nil {
		return nil, err
	}
	var list []netlink.Addr
	err := error(netlink.ErrDumpInterrupted) // by an address that came or went
	for errors.Is(err, netlink.ErrDumpInterrupted) {
		if err := ctx.Err(); err != nil {
			return nil, err
		}
		list, err = k.route.AddrList(nil, int(afOf(family)))
	}
	if err != nil {
		// The socket may be lost: the next one to ask has another.
		k.route.Close()
		k.route = nil
		return nil, fmt.Errorf("list addresses: %w", err)
	}
	out := make([]netip.Addr, 0, len(list))
	for i := range list {
		if list[i].IPNet == nil {
			continue
		}
		if a, ok := netip.AddrFromSlice(list[i].IP); ok {
			out = append(out, a.Unmap())
		}
	}
	return out, nil
}
