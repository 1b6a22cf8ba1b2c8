package nfnl

import (
	"context"
	"errors"
	"fmt"
	"os"
	"time"

	"golang.org/x/sys/unix"

	"github.com/go-proxier/proxier/internal/netns"
)

// answerTimeout bounds the wait for one datagram of an answer, which matters only if an answer is lost: the kernel
// answers before the request's send returns.
const answerTimeout = 10 * time.Second

// bufferSize holds any datagram of an answer: the kernel fills at most 32 KiB at a time (netlink_recvmsg of
// net/netlink/af_netlink.c), and one message of a dump may have 64 KiB.
const bufferSize = 64 << 10

// Conn is a netlink socket to the netfilter subsystems of one network namespace. It
// is not safe for concurrent use. After Close, its methods return errors that wrap
// [os.ErrClosed].
type Conn struct {
	fd  int
	seq uint32
	buf []byte
	// unread is set from a request on until its last answer is read.
	unread bool
	kernel unix.SockaddrNetlink
}

// Dial opens a socket in the namespace that ns is an open file of, or in the calling
// thread's if ns is nil. A namespace other than the thread's needs CAP_SYS_ADMIN.
func Dial(ns *os.File) (*Conn, error) {
	n, err := netns.Open(ns)
	if err != nil {
		return nil, err
	}
	defer n.Close()
	c := &Conn{fd: -1, buf: make([]byte, bufferSize), kernel: unix.SockaddrNetlink{Family: unix.AF_NETLINK}}
	if err := n.Do(c.open); err != nil {
		c.Close()
		return nil, fmt.Errorf("open netlink socket: %w", err)
	}
	return c, nil
}

func (c *Conn) open() (err error) {
	if c.fd, err = unix.Socket(unix.AF_NETLINK, unix.SOCK_RAW|unix.SOCK_CLOEXEC, unix.NETLINK_NETFILTER); err != nil {
		c.fd = -1
		return os.NewSyscallError("socket", err)
	}
	if err := unix.Bind(c.fd, &unix.SockaddrNetlink{Family: unix.AF_NETLINK}); err != nil {
		return os.NewSyscallError("bind", err)
	}
	timeout := unix.NsecToTimeval(answerTimeout.Nanoseconds())
	if err := unix.SetsockoptTimeval(c.fd, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &timeout); err != nil {
		return os.NewSyscallError("setsockopt", err)
	}
	// Request the kernel's explanation of a refusal, without a copy of the refused
	// message. Older kernels support neither option.
	_ = unix.SetsockoptInt(c.fd, unix.SOL_NETLINK, unix.NETLINK_EXT_ACK, 1)
	_ = unix.SetsockoptInt(c.fd, unix.SOL_NETLINK, unix.NETLINK_CAP_ACK, 1)
	return nil
}

// Close closes the socket. Further calls do nothing.
func (c *Conn) Close() error {
	if c.fd < 0 {
		return nil
	}
	err := os.NewSyscallError("close", unix.Close(c.fd))
	c.fd = -1
	return err
}

var errSocketClosed = fmt.Errorf("netlink socket: %w", os.ErrClosed)

// Closed reports whether Close was called.
func (c *Conn) Closed() bool { return c.fd < 0 }

// Sequence reserves n consecutive sequence numbers and returns the first.
func (c *Conn) Sequence(n int) uint32 {
	first := c.seq + 1
	c.seq += uint32(n)
	return first
}

// SetBuffers requests socket buffers of the given sizes in bytes. It returns the number
// of bytes that the socket can send in one call. Without CAP_NET_ADMIN in the initial user
// namespace the kernel grants no more than net.core.wmem_max and rmem_max.
func (c *Conn) SetBuffers(send, receive int) (limit int, err error) {
	for _, b := range []struct{ force, plain, size int }{
		{unix.SO_SNDBUFFORCE, unix.SO_SNDBUF, send}, {unix.SO_RCVBUFFORCE, unix.SO_RCVBUF, receive},
	} {
		if unix.SetsockoptInt(c.fd, unix.SOL_SOCKET, b.force, b.size) != nil {
			_ = unix.SetsockoptInt(c.fd, unix.SOL_SOCKET, b.plain, b.size)
		}
	}
	size, err := unix.GetsockoptInt(c.fd, unix.SOL_SOCKET, unix.SO_SNDBUF)
	if err != nil {
		return 0, c.failed("getsockopt", err)
	}
	return size - 32, nil // as netlink_sendmsg of net/netlink/af_netlink.c computes it
}

// Send sends one or more messages.
func (c *Conn) Send(b []byte) error {
	for {
		err := unix.Sendto(c.fd, b, 0, &c.kernel)
		switch {
		case err == nil:
			return nil
		case err != unix.EINTR:
			return c.failed("sendto", err)
		}
	}
}

// Receive returns one datagram from the kernel. The datagram is valid until the next
// call. With unix.MSG_DONTWAIT, Receive returns EAGAIN if no datagram is waiting.
func (c *Conn) Receive(flags int) ([]byte, error) {
	for {
		n, _, got, from, err := unix.Recvmsg(c.fd, c.buf, nil, flags)
		switch {
		case err == unix.EINTR:
			continue
		case err == unix.EAGAIN:
			return nil, err // as it is: it means that all answers were read
		case err != nil:
			return nil, c.failed("recvmsg", err)
		case got&unix.MSG_TRUNC != 0:
			return nil, fmt.Errorf("%w: longer than %d bytes", ErrMalformed, len(c.buf))
		}
		if a, ok := from.(*unix.SockaddrNetlink); ok && a.Pid == 0 {
			return c.buf[:n], nil
		}
		// Ignore datagrams from other processes, which may send to this socket.
	}
}

func (c *Conn) failed(call string, err error) error {
	if c.fd < 0 {
		return errSocketClosed
	}
	return fmt.Errorf("netlink: %w", os.NewSyscallError(call, err))
}

// Exchange sends requests with the n sequence numbers from first on. It calls fn with each message that answers one
// of them, including refusals, until every request has its last answer, or fn returns an error, which it returns.
// ENOBUFS means that the socket could not hold all answers.
func (c *Conn) Exchange(ctx context.Context, requests []byte, first uint32, n int, fn func(Message) error) error {
	if err := c.drain(ctx); err != nil {
		return err
	}
	c.unread = true
	if err := c.Send(requests); err != nil {
		return err
	}
	for left := n; left > 0; {
		if err := ctx.Err(); err != nil {
			return err
		}
		b, err := c.Receive(0)
		if errors.Is(err, unix.EAGAIN) {
			return fmt.Errorf("netlink: no answer within %v: %w", answerTimeout, err)
		}
		if err != nil {
			return err
		}
		for len(b) > 0 {
			var m Message
			if m, b, err = Next(b); err != nil {
				return err
			}
			if m.Seq-first >= uint32(n) {
				continue // an answer to an exchange that was abandoned
			}
			if err := fn(m); err != nil {
				return err
			}
			if m.Last() {
				left--
			}
		}
	}
	c.unread = false
	return nil
}

// drain reads the remaining answers of an abandoned exchange. The kernel starts no dump
// on a socket before the previous dump was read to its end.
func (c *Conn) drain(ctx context.Context) error {
	for {
		if err := ctx.Err(); err != nil {
			return err
		}
		if !c.unread {
			return nil
		}
		_, err := c.Receive(unix.MSG_DONTWAIT)
		switch {
		case errors.Is(err, unix.EAGAIN):
			c.unread = false
		case err != nil && !errors.Is(err, unix.ENOBUFS) && !errors.Is(err, ErrMalformed):
			return err
		}
	}
}

// Get sends a request and calls fn with the attributes of each object of the answer. The error is an [*Error] if the
// kernel refuses the request, wraps [ErrInterrupted] if the objects changed during a dump, or is fn's, after which fn
// is not called again.
func (c *Conn) Get(ctx context.Context, r Request, fn func(attrs []byte) error) error {
	flags := r.Flags | flagAck
	if r.Dump {
		flags = r.Flags | flagDump
	}
	first := c.Sequence(1)
	b := append(Begin(nil, r.Subsystem, r.Type, flags, first, r.Family), r.Attrs...)
	End(b, 0)
	interrupted := false
	err := c.Exchange(ctx, b, first, 1, func(m Message) error {
		interrupted = interrupted || m.Flags&flagInterrupted != 0
		if m.Last() {
			return m.Err()
		}
		return fn(m.Attrs())
	})
	if errors.Is(err, unix.EINTR) || err == nil && interrupted {
		return fmt.Errorf("netlink: %w", ErrInterrupted)
	}
	return err
}

// Commit finishes the batch, sends it, and returns once the kernel has committed or refused all of it. The error of a
// refusal is an [*Error]. An empty batch is not sent.
func (c *Conn) Commit(b *Batch) error {
	if b.Empty() && !c.Closed() {
		return nil
	}
	last, abandoned := b.seq-1, c.unread
	c.unread = true
	if err := c.Send(b.Finish()); err != nil {
		return err
	}
	// The answers are waiting: refusals, and behind them the acknowledgment of the last message. Commit reads all of
	// them, so that the next batch does not get an old answer. An acknowledgment without a refusal is the only
	// answer, unless those to an abandoned request are behind it.
	var failed *Error
	acked, lost := false, false
	for {
		answers, err := c.Receive(unix.MSG_DONTWAIT)
		switch {
		case errors.Is(err, unix.EAGAIN):
			c.unread = false
			if failed != nil {
				return failed
			}
			if lost || !acked {
				return fmt.Errorf("netlink: the kernel did not acknowledge the transaction: %w", unix.ENOBUFS)
			}
			return nil
		case errors.Is(err, unix.ENOBUFS):
			lost = true
			continue
		case err != nil:
			return err
		}
		for len(answers) > 0 {
			var m Message
			if m, answers, err = Next(answers); err != nil {
				return err
			}
			if !m.Acknowledges() {
				continue
			}
			switch err := m.Err(); {
			case err == nil && m.Seq == last:
				acked = true
			case err != nil && failed == nil:
				var refusal *Error // failed itself would be allocated for each batch
				if errors.As(err, &refusal) {
					failed, refusal.What = refusal, b.what(m.Seq)
				}
			}
		}
		if acked && failed == nil && !lost && !abandoned {
			c.unread = false
			return nil
		}
	}
}
