package nftables

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"github.com/go-proxier/proxier/internal/netns"
	"github.com/go-proxier/proxier/internal/nfnl"
	"github.com/go-proxier/proxier/nftables/internal/kernel"
	"github.com/go-proxier/proxier/ruleset/dataplane"
)

type socket struct {
	*kernel.Conn
	ns *netns.Namespace
	// route lists the namespace's network interfaces. It is nil without Config.Offload.
	route *netlink.Handle
}

var _ connection = &socket{}

// dial opens the sockets that a Backend needs in the network namespace that c names. c has its
// defaults.
func dial(c Config) (connection, error) {
	s, err := dialWith(c, kernel.SendBuffer)
	if err != nil {
		return nil, err
	}
	return s, nil
}

func dialWith(c Config, sendBuffer int) (*socket, error) {
	conn, err := kernel.Dial(c.NetNS, sendBuffer)
	if err != nil {
		return nil, unsupportedSocket(err)
	}
	conn.Refusal = func(e *nfnl.Error) error { return (*Error)(e) }
	s := &socket{Conn: conn}
	if s.ns, err = netns.Open(c.NetNS); err == nil && c.Offload != nil {
		if err = s.ns.Do(func() (err error) { s.route, err = netlink.NewHandle(unix.NETLINK_ROUTE); return err }); err != nil {
			err = fmt.Errorf("nftables: cannot open route socket: %w", err)
		}
	}
	if err != nil {
		s.Close()
		return nil, err
	}
	return s, nil
}

// unsupportedSocket returns the error of opening a socket: a
// [*dataplane.UnsupportedError] if the kernel has no such sockets or does not allow them.
func unsupportedSocket(err error) error {
	for _, errno := range []unix.Errno{unix.EPROTONOSUPPORT, unix.EAFNOSUPPORT, unix.EPERM, unix.EACCES} {
		if errors.Is(err, errno) {
			return &dataplane.UnsupportedError{Backend: "nftables", Feature: "an nfnetlink socket", Err: err}
		}
	}
	return fmt.Errorf("nftables: %w", err)
}

func (*socket) NewWriter(table string, rules ...kernel.Rules) writer {
	return kernel.NewWriter(table, rules...)
}

func (s *socket) Commit(w writer) error { return w.(*kernel.Writer).Commit(s.Conn) }

func (s *socket) WatchCommits(ctx context.Context, interval time.Duration, check func(context.Context) error, failed func(error)) error {
	return nfnl.WatchCommits(ctx, s.ns.File(), interval, check, failed)
}

func (s *socket) Close() error {
	if s.route != nil {
		s.route.Close()
	}
	if s.ns != nil {
		s.ns.Close()
	}
	return s.Conn.Close()
}

func (s *socket) Links() (map[string]int, error) {
	links, err := nfnl.Whole(context.Background(), netlink.ErrDumpInterrupted, s.route.LinkList)
	if err != nil && !errors.Is(err, netlink.ErrDumpInterrupted) {
		return nil, fmt.Errorf("list interfaces: %w", err)
	}
	out := make(map[string]int, len(links))
	for _, link := range links {
		out[link.Attrs().Name] = link.Attrs().Index
	}
	return out, nil
}

type linkSocket struct{ *nl.NetlinkSocket }

func (s *socket) WatchLinks() (linkEvents, error) {
	var l linkSocket
	err := s.ns.Do(func() (err error) {
		l.NetlinkSocket, err = nl.Subscribe(unix.NETLINK_ROUTE, unix.RTNLGRP_LINK)
		return err
	})
	if err != nil {
		return nil, err
	}
	return l, nil
}

func (l linkSocket) Next() ([]linkChange, error) {
	for {
		messages, from, err := l.Receive()
		switch {
		case errors.Is(err, unix.ENOBUFS): // the socket lost notifications
			return nil, nil
		case errors.Is(err, unix.EINTR):
			continue
		case err != nil:
			return nil, err
		case from.Pid != nl.PidKernel || len(messages) == 0:
			continue
		}
		var out []linkChange
		for _, m := range messages {
			header := unix.NlMsghdr(m.Header)
			link, err := netlink.LinkDeserialize(&header, m.Data)
			if err != nil {
				return nil, nil
			}
			out = append(out, linkChange{link.Attrs().Name, link.Attrs().Index, m.Header.Type == unix.RTM_DELLINK})
		}
		return out, nil
	}
}

// membarrierGlobal is MEMBARRIER_CMD_GLOBAL of linux/membarrier.h.
const membarrierGlobal = 1

// WaitForPackets implements [connection]. The kernel runs hooks inside an RCU read-side critical section, and
// membarrier(2) waits for such sections on all CPUs, about 20 ms.
func (*socket) WaitForPackets() {
	if _, _, errno := unix.Syscall(unix.SYS_MEMBARRIER, membarrierGlobal, 0, 0); errno != 0 {
		// The kernel was built without the call, or has CPUs without a timer tick (nohz_full).
		time.Sleep(20 * time.Millisecond)
	}
}
