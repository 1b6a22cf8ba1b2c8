package nfacct

import (
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/go-proxier/proxier/internal/nfsocket"
)

// ErrQuota is what errors are about an object with a quota, which rules match by
// whether that is used up: it is somebody else's.
var ErrQuota = errors.New("nfacct: the object has a quota")

// answerTimeout is how long the kernel has for an answer. It gives one before the
// request's send returns, so this only guards against its never coming.
const answerTimeout = 10 * time.Second

// Conn is a connection to the accounting objects of one network namespace. Its
// methods may be called concurrently. What the kernel refuses is a [unix.Errno]:
// EINVAL or EOPNOTSUPP where it knows no accounting objects, EPERM without
// CAP_NET_ADMIN.
type Conn struct {
	mu   sync.Mutex
	sock *nfsocket.Socket
	seq  uint32
	buf  []byte
}

// Dial opens a connection in the network namespace with the given file descriptor,
// or in the calling thread's if it is 0.
func Dial(netns int) (*Conn, error) {
	sock, err := nfsocket.Dial(netns)
	if err != nil {
		return nil, fmt.Errorf("nfacct: %w", err)
	}
	c := &Conn{sock: sock, buf: make([]byte, 8<<10)}
	if err := c.configure(); err != nil {
		sock.Close()
		return nil, err
	}
	return c, nil
}

func (c *Conn) configure() error {
	timeout := unix.NsecToTimeval(answerTimeout.Nanoseconds())
	if err := unix.SetsockoptTimeval(c.sock.FD(), unix.SOL_SOCKET, unix.SO_RCVTIMEO, &timeout); err != nil {
		return fmt.Errorf("nfacct: set receive timeout: %w", err)
	}
	return nil
}

// Close closes the connection. Methods return [os.ErrClosed] afterwards, but for
// Close, which does nothing.
func (c *Conn) Close() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.sock.Close()
}

// Add makes an object that has counted nothing, unless there is one of that name:
// it goes on counting, and made is false. The error is [ErrQuota] if that has a
// quota.
func (c *Conn) Add(name string) (made bool, err error) {
	_, err = c.request(msgNew, unix.NLM_F_CREATE|unix.NLM_F_EXCL, name)
	switch {
	case err == nil:
		return true, nil
	case !errors.Is(err, unix.EEXIST):
		return false, err
	}
	o, err := c.Get(name)
	if err == nil && o.quota {
		err = fmt.Errorf("%w: %s", ErrQuota, name)
	}
	return false, err
}

// Get returns an object. The error is ENOENT if there is none of that name.
func (c *Conn) Get(name string) (Object, error) {
	o, err := c.request(msgGet, 0, name)
	switch {
	case err != nil:
		return Object{}, err
	case o == nil || o.Name != name:
		return Object{}, fmt.Errorf("nfacct: %s: the answer is about something else", name)
	}
	return *o, nil
}

// Delete deletes an object. The error is EBUSY if a rule counts into it, and ENOENT
// if there is none of that name.
func (c *Conn) Delete(name string) error {
	_, err := c.request(msgDelete, 0, name)
	return err
}

// request sends a request and returns what object it was answered with, if any.
func (c *Conn) request(kind, flags uint16, name string) (*Object, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if err := c.renew(); err != nil {
		return nil, err
	}
	c.seq++
	msg, err := message(kind, flags, c.seq, name)
	if err != nil {
		return nil, err
	}
	o, err := c.exchange(msg)
	if err != nil {
		return nil, fmt.Errorf("nfacct: %s: %w", name, err)
	}
	return o, nil
}

// renew opens the socket anew if it was lost.
func (c *Conn) renew() error {
	if c.sock.FD() < 0 {
		return fmt.Errorf("nfacct: %w", os.ErrClosed)
	}
	if !c.sock.Lost() {
		return nil
	}
	if err := c.sock.Redial(); err != nil {
		return fmt.Errorf("nfacct: %w", err)
	}
	return c.configure()
}

// exchange sends a message, and reads what comes back until it is acknowledged.
func (c *Conn) exchange(msg []byte) (o *Object, err error) {
	fd := c.sock.FD()
	if err := retry(func() error { return unix.Sendto(fd, msg, 0, &unix.SockaddrNetlink{Family: unix.AF_NETLINK}) }); err != nil {
		return nil, os.NewSyscallError("sendto", err)
	}
	for {
		var n int
		if err := retry(func() (err error) {
			n, _, err = unix.Recvfrom(fd, c.buf, 0)
			return err
		}); err != nil {
			return nil, os.NewSyscallError("recvfrom", err)
		}
		answers, err := syscall.ParseNetlinkMessage(c.buf[:n])
		if err != nil {
			return nil, fmt.Errorf("answer: %w", err)
		}
		for _, a := range answers {
			switch {
			case a.Header.Seq != c.seq:
				// What came too late for an earlier request.
			case a.Header.Type == unix.NLMSG_ERROR:
				if len(a.Data) < 4 {
					return nil, errShort
				}
				if errno := int32(binary.NativeEndian.Uint32(a.Data)); errno != 0 {
					return nil, unix.Errno(-errno)
				}
				return o, nil
			case a.Header.Type == unix.NFNL_SUBSYS_ACCT<<8|msgNew:
				parsed, err := parse(a.Data)
				if err != nil {
					return nil, err
				}
				o = &parsed
			}
		}
	}
}

// retry calls f again as long as a signal keeps it from its work.
func retry(f func() error) error {
	for {
		if err := f(); err != unix.EINTR {
			return err
		}
	}
}
