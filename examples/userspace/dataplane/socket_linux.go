package dataplane

import (
	"errors"
	"net/netip"
	"syscall"

	"golang.org/x/sys/unix"
)

// control prepares a socket before it is bound. It allows an address that the node does not
// have yet (IP_FREEBIND, IPV6_FREEBIND), and limits the socket to its audience.
func control(at netip.Addr, who audience) func(network, address string, c syscall.RawConn) error {
	return func(_, _ string, c syscall.RawConn) error {
		return onSocket(c, func(fd int) error {
			level, opt := unix.IPPROTO_IP, unix.IP_FREEBIND
			if at.Is6() {
				level, opt = unix.IPPROTO_IPV6, unix.IPV6_FREEBIND
			}
			if err := unix.SetsockoptInt(fd, level, opt, 1); err != nil {
				return err
			}
			return attach(fd, at.Is6(), who)
		})
	}
}

// setAudience changes the audience of a listening socket. Accepted connections stay.
func setAudience(s syscall.Conn, at netip.Addr, who audience) error {
	c, err := s.SyscallConn()
	if err != nil {
		return err
	}
	return onSocket(c, func(fd int) error { return attach(fd, at.Is6(), who) })
}

func onSocket(c syscall.RawConn, f func(fd int) error) error {
	var err error
	if cerr := c.Control(func(fd uintptr) { err = f(int(fd)) }); cerr != nil {
		return cerr
	}
	return err
}

// attach attaches the filter of an audience to a socket. If the audience is too large for a
// filter, or the kernel refuses filters of TCP sockets to a process without CAP_NET_ADMIN (6.18.44
// does), the socket answers all sources, and connections from others are reset.
func attach(fd int, six bool, who audience) error {
	prog := filter(six, who)
	if prog == nil {
		err := unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_DETACH_FILTER, 0)
		if errors.Is(err, unix.ENOENT) { // the socket had no filter
			return nil
		}
		return err
	}
	err := unix.SetsockoptSockFprog(fd, unix.SOL_SOCKET, unix.SO_ATTACH_FILTER,
		&unix.SockFprog{Len: uint16(len(prog)), Filter: &prog[0]})
	if errors.Is(err, unix.ENOMEM) || errors.Is(err, unix.EPERM) { // ENOMEM: net.core.optmem_max
		return attach(fd, six, nil)
	}
	return err
}
