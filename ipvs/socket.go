//go:build linux

package ipvs

import (
	"errors"
	"fmt"
	"os"
	"time"

	"golang.org/x/sys/unix"
)

// netlinkTimeout bounds the wait for an answer of rtnetlink. Package moby/ipvs
// has no timeout; IPVS answers within the request.
const netlinkTimeout = 30 * time.Second

// socketError returns err, or an error that wraps [os.ErrClosed] if another part of the
// process has closed the socket's descriptor.
func socketError(err error) error {
	if errors.Is(err, unix.EBADF) || errors.Is(err, unix.ENOTSOCK) {
		return fmt.Errorf("netlink socket: %w", os.ErrClosed)
	}
	return err
}
