//go:build linux

package ipvs

import (
	"errors"
	"fmt"
	"os"
	"time"

	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"
)

// netlinkTimeout bounds the wait for an answer of rtnetlink and ipset. Package moby/ipvs
// has no timeout; IPVS answers within the request.
const netlinkTimeout = 30 * time.Second

// dialNetfilter opens a socket to netfilter in the calling thread's namespace.
func dialNetfilter() (*nl.SocketHandle, error) {
	s, err := nl.Subscribe(unix.NETLINK_NETFILTER)
	if err != nil {
		return nil, fmt.Errorf("open nfnetlink socket: %w", err)
	}
	tv := unix.NsecToTimeval(int64(netlinkTimeout))
	if err := errors.Join(s.SetSendTimeout(&tv), s.SetReceiveTimeout(&tv)); err != nil {
		s.Close()
		return nil, fmt.Errorf("set timeouts of nfnetlink socket: %w", err)
	}
	return &nl.SocketHandle{Socket: s}, nil
}

// dialAddressEvents opens a socket on which the kernel reports changes of addresses, in
// the calling thread's namespace.
func dialAddressEvents() (fd int, err error) {
	fd, err = unix.Socket(unix.AF_NETLINK, unix.SOCK_RAW|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, unix.NETLINK_ROUTE)
	if err != nil {
		return -1, fmt.Errorf("open rtnetlink socket: %w", err)
	}
	err = unix.Bind(fd, &unix.SockaddrNetlink{
		Family: unix.AF_NETLINK, Groups: 1<<(unix.RTNLGRP_IPV4_IFADDR-1) | 1<<(unix.RTNLGRP_IPV6_IFADDR-1),
	})
	if err != nil {
		unix.Close(fd)
		return -1, fmt.Errorf("subscribe to changes of addresses: %w", err)
	}
	return fd, nil
}

// socketError returns err, or an error that wraps [os.ErrClosed] if another part of the
// process has closed the socket's descriptor.
func socketError(err error) error {
	if errors.Is(err, unix.EBADF) || errors.Is(err, unix.ENOTSOCK) {
		return fmt.Errorf("netlink socket: %w", os.ErrClosed)
	}
	return err
}
