//go:build linux

package nlbatch

import (
	"encoding/binary"
	"errors"
	"fmt"
	"os"

	"golang.org/x/sys/unix"

	"github.com/go-proxier/proxier/internal/nfsocket"
)

// Conn is a netlink socket to nf_tables of one network namespace. It is not safe
// for concurrent use.
type Conn struct {
	sock  *nfsocket.Socket
	limit int
	rcv   []byte
	seq   uint32
	// commits counts the transactions that were committed.
	commits uint32
}

// ErrTooLarge is in the error of a batch that is larger than the socket can
// send. The kernel takes a transaction in one piece of at most the socket's send
// buffer: beyond net.core.wmem_max that needs CAP_NET_ADMIN in the initial user
// namespace.
var ErrTooLarge = errors.New("transaction is larger than the socket's send buffer")

// Error is the kernel's refusal of a batch.
type Error struct {
	// Errno is the kernel's error number.
	Errno unix.Errno
	// What is the note of the message that was refused, "" for the commit itself.
	What string
	// Message is the kernel's extended acknowledgement, often "".
	Message string
}

// Error says what was refused and why.
func (e *Error) Error() string {
	s := e.Errno.Error()
	if e.Message != "" {
		s += " (" + e.Message + ")"
	}
	if e.What != "" {
		return e.What + ": " + s
	}
	return s
}

// Unwrap returns the error number, so that errors.Is finds it.
func (e *Error) Unwrap() error { return e.Errno }

// wantBuffer is the socket buffer asked for: enough for a transaction of a
// million elements. The kernel allocates only what is used.
const wantBuffer = 256 << 20

// Dial opens a socket in the network namespace with the given file descriptor,
// or in the calling thread's if it is 0.
func Dial(netns int) (*Conn, error) {
	sock, err := nfsocket.Dial(netns)
	if err != nil {
		return nil, err
	}
	c := &Conn{sock: sock, rcv: make([]byte, 64<<10)}
	if c.limit, err = c.configure(); err != nil {
		sock.Close()
		return nil, err
	}
	return c, nil
}

// configure makes the socket's settings and returns how much it can send at once.
func (c *Conn) configure() (limit int, err error) {
	fd := c.sock.FD()
	// The kernel's own words for an error, and no copy of what was refused.
	_ = unix.SetsockoptInt(fd, unix.SOL_NETLINK, unix.NETLINK_EXT_ACK, 1)
	_ = unix.SetsockoptInt(fd, unix.SOL_NETLINK, unix.NETLINK_CAP_ACK, 1)
	if err := unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_SNDBUFFORCE, wantBuffer); err != nil {
		_ = unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_SNDBUF, wantBuffer)
	}
	if err := unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_RCVBUFFORCE, 8<<20); err != nil {
		_ = unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_RCVBUF, 8<<20)
	}
	size, err := unix.GetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_SNDBUF)
	if err != nil {
		return 0, fmt.Errorf("netlink socket: %w", os.NewSyscallError("getsockopt", err))
	}
	return size - 32, nil // as netlink_sendmsg has it
}

// Renew opens the socket anew, in the same network namespace, if it was lost: its
// descriptor was closed by somebody else, or is another file now. A Limit that was
// lowered stays.
func (c *Conn) Renew() (renewed bool, err error) {
	if c.Closed() {
		return false, fmt.Errorf("netlink: %w", os.ErrClosed)
	}
	if !c.sock.Lost() {
		return false, nil
	}
	if err := c.sock.Redial(); err != nil {
		return false, err
	}
	limit, err := c.configure()
	if err != nil {
		return false, err
	}
	c.limit = min(c.limit, limit)
	return true, nil
}

// Close closes the socket. What is called after it returns [os.ErrClosed], but for
// Close itself, which then does nothing.
func (c *Conn) Close() error {
	return c.sock.Close()
}

// Closed reports whether Close was called.
func (c *Conn) Closed() bool { return c.sock.FD() < 0 }

// Limit is the largest batch, in bytes, that the socket can send.
func (c *Conn) Limit() int { return c.limit }

// SetLimit changes Limit, so that tests need no large batches. To raise it lets
// the socket send no more than it could.
func (c *Conn) SetLimit(bytes int) { c.limit = bytes }

// Commits returns how many transactions this connection has committed. Each adds
// one to [Conn.Generation].
func (c *Conn) Commits() uint32 { return c.commits }

// Commit sends the batch and returns once the kernel has committed it, or
// refused all of it: the error is then an [*Error].
func (c *Conn) Commit(b *Batch) error {
	if c.Closed() {
		return fmt.Errorf("netlink: %w", os.ErrClosed)
	}
	if b.Empty() {
		return nil
	}
	last := b.seq - 1
	b.finish()
	if len(b.buf) > c.limit {
		return fmt.Errorf("%w: %d bytes, at most %d", ErrTooLarge, len(b.buf), c.limit)
	}
	if err := c.send(b.buf); err != nil {
		return err
	}
	// The kernel has done its work by now and its answers are waiting: all are read,
	// so that none is taken for another's, even if there were too many refusals for
	// the socket to hold.
	var failed *Error
	acked, lost := false, false
	for {
		msg, err := c.receive(unix.MSG_DONTWAIT)
		switch {
		case errors.Is(err, unix.EAGAIN):
			if failed != nil {
				return failed
			}
			if lost || !acked {
				return fmt.Errorf("netlink: the kernel did not acknowledge the transaction: %w", unix.ENOBUFS)
			}
			c.commits++
			return nil
		case errors.Is(err, unix.ENOBUFS):
			lost = true
			continue
		case err != nil:
			return err
		}
		for len(msg) >= unix.NLMSG_HDRLEN {
			n := int(binary.NativeEndian.Uint32(msg))
			if n < unix.NLMSG_HDRLEN || n > len(msg) {
				return errors.New("netlink: malformed answer")
			}
			typ, seq := binary.NativeEndian.Uint16(msg[4:]), binary.NativeEndian.Uint32(msg[8:])
			if typ == unix.NLMSG_ERROR && n >= unix.NLMSG_HDRLEN+4 {
				errno := unix.Errno(-int32(binary.NativeEndian.Uint32(msg[unix.NLMSG_HDRLEN:])))
				switch {
				case errno == 0 && seq == last:
					acked = true
				case errno != 0 && failed == nil:
					failed = &Error{Errno: errno, What: b.what(seq), Message: extendedAck(msg[:n])}
				}
			}
			msg = msg[min(align(n), len(msg)):]
		}
	}
}

// extendedAck returns the kernel's message in an error answer
// (linux/netlink.h, NLMSGERR_ATTR_MSG).
func extendedAck(msg []byte) string {
	// nlmsghdr, error number, the refused message's nlmsghdr.
	at := unix.NLMSG_HDRLEN + 4 + unix.NLMSG_HDRLEN
	for at+4 <= len(msg) {
		n, typ := int(binary.NativeEndian.Uint16(msg[at:])), binary.NativeEndian.Uint16(msg[at+2:])
		if n < 4 || at+n > len(msg) {
			break
		}
		if typ&^unix.NLA_F_NESTED == unix.NLMSGERR_ATTR_MSG {
			s := msg[at+4 : at+n]
			for len(s) > 0 && s[len(s)-1] == 0 {
				s = s[:len(s)-1]
			}
			return string(s)
		}
		at += align(n)
	}
	return ""
}

func (c *Conn) send(buf []byte) error {
	if c.Closed() {
		return fmt.Errorf("netlink: %w", os.ErrClosed)
	}
	for {
		err := unix.Sendto(c.sock.FD(), buf, 0, &unix.SockaddrNetlink{Family: unix.AF_NETLINK})
		switch {
		case err == nil:
			return nil
		case errors.Is(err, unix.EINTR):
			continue
		}
		return fmt.Errorf("netlink: %w", os.NewSyscallError("sendto", err))
	}
}

// receive returns one datagram. Its error is unix.EAGAIN itself when there is
// none and flags say not to wait.
func (c *Conn) receive(flags int) ([]byte, error) {
	for {
		n, _, err := unix.Recvfrom(c.sock.FD(), c.rcv, flags)
		switch {
		case err == nil:
			return c.rcv[:n], nil
		case errors.Is(err, unix.EINTR):
			continue
		case errors.Is(err, unix.EAGAIN):
			return nil, unix.EAGAIN
		}
		return nil, fmt.Errorf("netlink: %w", os.NewSyscallError("recvfrom", err))
	}
}
