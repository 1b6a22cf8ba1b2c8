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

// rest is how long WatchCommits waits for a notification before it checks anyway: for the
// case that another part of the process closed a socket.
const rest = 10 * time.Second

// WatchCommits calls check after transactions that any process commits to nf_tables in the
// network namespace that ns is an open file of, at most once an interval, and failed with
// each of its errors but those after ctx is done. It returns when ctx is done, with ctx's
// error, when check returns [os.ErrClosed], with that, or when it cannot listen. While nothing is committed, it
// wakes up every ten seconds. The interval must be positive.
//
// For each transaction the kernel writes a notification of every object as long as a socket
// listens. So WatchCommits listens only until the next transaction, and then not for one
// interval: of many transactions few are slower.
func WatchCommits(ctx context.Context, ns *os.File, interval time.Duration, check func(context.Context) error, failed func(error)) error {
	c, err := listen(ns)
	if err != nil {
		return err
	}
	defer func() {
		if c != nil {
			c.f.Close()
		}
	}()
	tick := time.NewTimer(interval)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-tick.C:
		}
		err := c.member(unix.NETLINK_ADD_MEMBERSHIP)
		for quiet := err == nil; ; {
			switch err := check(ctx); {
			case errors.Is(err, os.ErrClosed):
				return err
			case err != nil && ctx.Err() == nil:
				failed(err)
			}
			if !quiet {
				break
			}
			if quiet, err = c.quiet(ctx); !quiet {
				break
			}
		}
		if ctx.Err() == nil {
			err = errors.Join(err, c.member(unix.NETLINK_DROP_MEMBERSHIP))
		}
		if err != nil && ctx.Err() == nil {
			// Most likely another part of the process closed the socket.
			c.f.Close()
			if c, err = listen(ns); err != nil {
				return err
			}
		}
		tick.Reset(interval)
	}
}

// commits is a socket that receives the notification at the end of each transaction.
type commits struct {
	f   *os.File
	raw syscall.RawConn
}

func listen(ns *os.File) (*commits, error) {
	conn, err := Dial(ns)
	if err != nil {
		return nil, err
	}
	c := &commits{}
	if err = errors.Join(unix.SetNonblock(conn.fd, true), onlyGenerations(conn.fd)); err == nil {
		c.f = os.NewFile(uintptr(conn.fd), "nf_tables notifications")
		c.raw, err = c.f.SyscallConn()
	}
	if err != nil {
		conn.Close()
		return nil, fmt.Errorf("netlink: %w", err)
	}
	return c, nil
}

// onlyGenerations has a socket receive no messages but those of a new generation. The
// kernel sends each of them by itself (nf_tables_gen_notify of net/netfilter/nf_tables_api.c).
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
func (c *commits) member(op int) error {
	var err error
	if e := c.raw.Control(func(fd uintptr) {
		err = os.NewSyscallError("setsockopt", unix.SetsockoptInt(int(fd), unix.SOL_NETLINK, op, unix.NFNLGRP_NFTABLES))
	}); e != nil {
		return e
	}
	return err
}

// quiet waits for a notification and reports whether there was none for as long as rest. It
// returns when ctx is done.
func (c *commits) quiet(ctx context.Context) (bool, error) {
	if err := c.f.SetReadDeadline(time.Now().Add(rest)); err != nil {
		return false, err
	}
	stop := context.AfterFunc(ctx, func() { c.f.SetReadDeadline(time.Unix(1, 0)) })
	defer stop()
	var buf [256]byte
	received := false
	var failed error
	err := c.raw.Read(func(fd uintptr) bool {
		for {
			_, _, err := unix.Recvfrom(int(fd), buf[:], unix.MSG_DONTWAIT)
			switch err {
			case nil, unix.ENOBUFS:
				received = true
			case unix.EAGAIN:
				return received
			case unix.EINTR:
			default:
				failed = os.NewSyscallError("recvfrom", err)
				return true
			}
		}
	})
	if errors.Is(err, os.ErrDeadlineExceeded) {
		return ctx.Err() == nil, nil
	}
	return false, errors.Join(err, failed)
}
