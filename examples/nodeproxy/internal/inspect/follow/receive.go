//go:build linux

package follow

import (
	"context"
	"errors"
	"fmt"
	"os"
	"time"

	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"
)

// listen returns a socket that receives the messages of a group.
func listen(group uint32) (*netlink.Conn, error) {
	c, err := netlink.Dial(unix.NETLINK_NETFILTER, nil)
	if err != nil {
		return nil, unsupported("open a netlink socket", err)
	}
	if err := c.JoinGroup(group); err != nil {
		c.Close()
		return nil, unsupported("receive the kernel's messages", err)
	}
	// If this fails, the default buffer is enough for a few packets.
	_ = c.SetReadBuffer(receiveBuffer)
	return c, nil
}

// receive calls fn with the messages of a socket until fn returns false or the context ends.
// Without messages it calls fn several times a second. It counts overruns of the buffer.
func receive(ctx context.Context, c *netlink.Conn, overrun *int, fn func([]netlink.Message) (more bool)) error {
	for more := true; more && ctx.Err() == nil; {
		if err := c.SetReadDeadline(time.Now().Add(idle / 10)); err != nil {
			return err
		}
		list, err := c.Receive()
		switch {
		case errors.Is(err, os.ErrDeadlineExceeded):
		case errors.Is(err, unix.ENOBUFS):
			*overrun++
		case err != nil:
			return fmt.Errorf("cannot receive the kernel's messages: %w", err)
		}
		more = fn(list)
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
