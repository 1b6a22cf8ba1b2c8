package nftables

import (
	"context"
	"errors"
	"fmt"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"github.com/go-proxier/proxier/internal/nfnl"
)

// Links implements [connection].
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

// linkSocket is a socket that receives notifications about interfaces.
type linkSocket struct{ *nl.NetlinkSocket }

// WatchLinks implements [connection].
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

// Next implements [linkEvents].
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
