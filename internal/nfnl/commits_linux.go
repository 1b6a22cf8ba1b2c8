package nfnl

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// quietInterval is how long WatchCommits waits for a notification before it calls check
// without one, which may have something to try again.
const quietInterval = time.Minute

// WatchCommits calls check after transactions that any process commits to nf_tables in the network namespace that ns
// is an open file of, at most once an interval, and every minute otherwise. It calls failed with each error of check,
// except after ctx is done. It returns ctx's cause, or an error of check that wraps [os.ErrClosed]. While it cannot
// listen, it calls check at the interval. An interval that is not positive is an error.
//
// While a socket listens, the kernel writes a notification of every object of a transaction. So WatchCommits listens
// only until the next transaction, and then pauses for one interval.
func WatchCommits(ctx context.Context, ns *os.File, interval time.Duration, check func(context.Context) error, failed func(error)) error {
	if interval <= 0 {
		return fmt.Errorf("netlink: cannot watch: interval %v is not positive", interval)
	}
	tick := time.NewTimer(interval)
	defer tick.Stop()
	var l *listener
	defer func() { l.close() }()
	for {
		select {
		case <-ctx.Done():
			return context.Cause(ctx)
		case <-tick.C:
		}
		var broken error
		if l == nil {
			l, broken = listen(ns)
		}
		if broken == nil {
			broken = l.member(unix.NETLINK_ADD_MEMBERSHIP)
		}
		for quiet := true; quiet && ctx.Err() == nil; {
			switch err := check(ctx); {
			case errors.Is(err, os.ErrClosed):
				return err
			case err != nil && ctx.Err() == nil:
				failed(err)
			}
			if quiet = broken == nil; quiet {
				quiet, broken = l.quiet(ctx)
			}
		}
		if broken == nil {
			broken = l.member(unix.NETLINK_DROP_MEMBERSHIP)
		}
		if broken != nil {
			l.close()
			l = nil
		}
		tick.Reset(interval)
	}
}

// listener is a socket that can receive the notification at the end of each transaction. The runtime waits for an
// epoll instance that holds the socket, because the socket itself blocks.
type listener struct {
	*Conn
	epoll *os.File
	ready syscall.RawConn // epoll's
}

func listen(ns *os.File) (*listener, error) {
	conn, err := Dial(ns)
	if err != nil {
		return nil, err
	}
	l := &listener{Conn: conn}
	if err := l.prepare(); err != nil {
		l.close()
		return nil, fmt.Errorf("netlink: %w", err)
	}
	return l, nil
}

func (l *listener) prepare() error {
	if err := onlyGenerations(l.fd); err != nil {
		return err
	}
	fd, err := unix.EpollCreate1(unix.EPOLL_CLOEXEC)
	if err != nil {
		return os.NewSyscallError("epoll_create1", err)
	}
	err = unix.SetNonblock(fd, true) // so that the runtime waits for it
	l.epoll = os.NewFile(uintptr(fd), "nf_tables notifications")
	if err != nil {
		return os.NewSyscallError("fcntl", err)
	}
	if err := unix.EpollCtl(fd, unix.EPOLL_CTL_ADD, l.fd, &unix.EpollEvent{Events: unix.EPOLLIN}); err != nil {
		return os.NewSyscallError("epoll_ctl", err)
	}
	l.ready, err = l.epoll.SyscallConn()
	return err
}

// close closes the socket. A nil l does nothing.
func (l *listener) close() {
	if l == nil {
		return
	}
	l.Conn.Close()
	if l.epoll != nil {
		l.epoll.Close()
	}
}

// onlyGenerations makes a socket receive only messages about a new generation, each a datagram of its own
// (nf_tables_gen_notify of net/netfilter/nf_tables_api.c).
func onlyGenerations(fd int) error {
	const typeOffset = 4 // in struct nlmsghdr (linux/netlink.h)
	var typ [2]byte
	binary.NativeEndian.PutUint16(typ[:], unix.NFNL_SUBSYS_NFTABLES<<8|unix.NFT_MSG_NEWGEN)
	program := []unix.SockFilter{
		{Code: unix.BPF_LD | unix.BPF_H | unix.BPF_ABS, K: typeOffset}, // reads big-endian
		{Code: unix.BPF_JMP | unix.BPF_JEQ | unix.BPF_K, Jf: 1, K: uint32(binary.BigEndian.Uint16(typ[:]))},
		{Code: unix.BPF_RET | unix.BPF_K, K: 1 << 16},
		{Code: unix.BPF_RET | unix.BPF_K},
	}
	return os.NewSyscallError("setsockopt", unix.SetsockoptSockFprog(fd, unix.SOL_SOCKET, unix.SO_ATTACH_FILTER,
		&unix.SockFprog{Len: uint16(len(program)), Filter: &program[0]}))
}

// member joins or leaves the group of nf_tables.
func (l *listener) member(op int) error {
	return os.NewSyscallError("setsockopt", unix.SetsockoptInt(l.fd, unix.SOL_NETLINK, op, unix.NFNLGRP_NFTABLES))
}

// quiet waits for a notification and reports whether none came during quietInterval. It
// returns early when ctx is done.
func (l *listener) quiet(ctx context.Context) (bool, error) {
	if err := l.epoll.SetReadDeadline(time.Now().Add(quietInterval)); err != nil {
		return false, err
	}
	defer context.AfterFunc(ctx, func() { l.epoll.SetReadDeadline(time.Unix(1, 0)) })()
	var failed error
	err := l.ready.Read(func(uintptr) bool {
		var received bool
		received, failed = l.received()
		return received || failed != nil
	})
	if errors.Is(err, os.ErrDeadlineExceeded) {
		return true, nil
	}
	return false, errors.Join(err, failed)
}

// received reads all notifications and reports whether there was one. A lost notification
// counts.
func (l *listener) received() (any bool, err error) {
	for {
		_, err := l.Receive(unix.MSG_DONTWAIT)
		switch {
		case errors.Is(err, unix.EAGAIN):
			return any, nil
		case err != nil && !errors.Is(err, unix.ENOBUFS):
			return any, err
		}
		any = true
	}
}
