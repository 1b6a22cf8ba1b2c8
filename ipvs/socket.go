//go:build linux

package ipvs

import (
	"errors"
	"fmt"
	"reflect"
	"runtime"

	moby "github.com/moby/ipvs"
	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"github.com/go-proxier/proxier/internal/nfsocket"
)

// socket is a library's handle of a netlink socket, made anew if the socket is lost:
// a descriptor may be closed by a mistake elsewhere in the process, and its number
// given to another file.
type socket[T any] struct {
	netns  int // as [Config.NetNS]
	handle T
	// fd is the descriptor, -1 if it is not known, and file what it was when it was
	// opened.
	fd   int
	file nfsocket.Identity
	open func() (T, error)
	// number returns the descriptor of a handle.
	number func(T) int
	closes func(T)
}

// dial opens the socket, in the calling thread's namespace.
func (s *socket[T]) dial() error {
	h, err := s.open()
	if err != nil {
		return err
	}
	fd := s.number(h)
	file, err := nfsocket.Identify(fd)
	if err != nil && fd >= 0 {
		s.closes(h)
		return err
	}
	s.handle, s.fd, s.file = h, fd, file
	return nil
}

// lost reports whether the descriptor was closed by somebody else, or is another file
// now.
func (s *socket[T]) lost() bool {
	if s.fd < 0 {
		return false
	}
	file, err := nfsocket.Identify(s.fd)
	return err != nil || file != s.file
}

// use calls f with the handle. If the socket is lost, before or meanwhile, it opens
// another one and calls f again: what f asks for must be such that it can be asked for
// twice.
func (s *socket[T]) use(f func(T) error) error {
	const most = 3
	for n := 1; ; n++ {
		if s.lost() {
			old := s.handle
			if err := within(s.netns, s.dial); err != nil {
				return fmt.Errorf("open a lost socket anew: %w", err)
			}
			keep(old)
		}
		err := f(s.handle)
		if err == nil || n == most || !s.lost() {
			return err
		}
	}
}

func (s *socket[T]) close() {
	if s.lost() {
		keep(s.handle)
		return
	}
	s.closes(s.handle)
}

// keep has the garbage collector never free what v refers to. It would close a lost
// socket's descriptor, which may be another file's by now.
func keep(v any) {
	type kept struct{ v any }
	var again func(*kept)
	again = func(k *kept) { runtime.SetFinalizer(k, again) }
	again(&kept{v})
}

// fieldOf returns the number of the socket that a library has in a field of its
// own, and in fields of that, or -1 if there is no such field.
func fieldOf(v reflect.Value, path ...any) int {
	for _, p := range path {
		for v.Kind() == reflect.Pointer {
			v = v.Elem()
		}
		switch p := p.(type) {
		case string:
			if v.Kind() != reflect.Struct {
				return -1
			}
			v = v.FieldByName(p)
		case int:
			if v.Kind() != reflect.Map || v.Type().Key().Kind() != reflect.Int {
				return -1
			}
			v = v.MapIndex(reflect.ValueOf(p))
		}
	}
	if !v.CanInt() {
		return -1
	}
	return int(v.Int())
}

func mobySocket(netns int) *socket[*moby.Handle] {
	return &socket[*moby.Handle]{netns: netns, open: openIPVS, closes: (*moby.Handle).Close,
		number: func(h *moby.Handle) int { return fieldOf(reflect.ValueOf(h), "sock", "fd") }}
}

func routeSocket(netns int) *socket[*netlink.Handle] {
	return &socket[*netlink.Handle]{
		netns: netns,
		open: func() (*netlink.Handle, error) {
			h, err := netlink.NewHandle(unix.NETLINK_ROUTE)
			if err != nil {
				return nil, fmt.Errorf("netlink: %w", err)
			}
			if err := h.SetSocketTimeout(netlinkTimeout); err != nil {
				h.Close()
				return nil, fmt.Errorf("netlink: %w", err)
			}
			return h, nil
		},
		closes: (*netlink.Handle).Close,
		number: func(h *netlink.Handle) int {
			return fieldOf(reflect.ValueOf(h), "sockets", unix.NETLINK_ROUTE, "Socket", "fd")
		},
	}
}

func netfilterSocket(netns int) *socket[*nl.SocketHandle] {
	return &socket[*nl.SocketHandle]{
		netns: netns,
		open: func() (*nl.SocketHandle, error) {
			s, err := nl.Subscribe(unix.NETLINK_NETFILTER)
			if err != nil {
				return nil, fmt.Errorf("netlink: %w", err)
			}
			tv := unix.NsecToTimeval(int64(netlinkTimeout))
			if err := errors.Join(s.SetSendTimeout(&tv), s.SetReceiveTimeout(&tv)); err != nil {
				s.Close()
				return nil, fmt.Errorf("netlink: %w", err)
			}
			return &nl.SocketHandle{Socket: s}, nil
		},
		closes: (*nl.SocketHandle).Close,
		number: func(h *nl.SocketHandle) int { return h.Socket.GetFd() },
	}
}

// newsSocket is one that tells of changes of addresses.
func newsSocket(netns int) *socket[int] {
	return &socket[int]{
		netns: netns,
		open: func() (int, error) {
			fd, err := unix.Socket(unix.AF_NETLINK, unix.SOCK_RAW|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, unix.NETLINK_ROUTE)
			if err != nil {
				return -1, fmt.Errorf("netlink: %w", err)
			}
			err = unix.Bind(fd, &unix.SockaddrNetlink{
				Family: unix.AF_NETLINK, Groups: 1<<(unix.RTNLGRP_IPV4_IFADDR-1) | 1<<(unix.RTNLGRP_IPV6_IFADDR-1),
			})
			if err != nil {
				unix.Close(fd)
				return -1, fmt.Errorf("netlink: %w", err)
			}
			return fd, nil
		},
		closes: func(fd int) { unix.Close(fd) },
		number: func(fd int) int { return fd },
	}
}
