package nftables

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/go-proxier/proxier/internal/netns"
	"github.com/go-proxier/proxier/internal/nfnl"
	"github.com/go-proxier/proxier/nftables/internal/kernel"
	"github.com/go-proxier/proxier/ruleset/dataplane"
)

// socket is a netlink socket to nf_tables.
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

// dialWith is dial with a send buffer of the given size.
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

// NewWriter implements [connection].
func (*socket) NewWriter(table string, rules ...kernel.Rules) writer {
	return kernel.NewWriter(table, rules...)
}

// Commit implements [connection].
func (s *socket) Commit(w writer) error { return w.(*kernel.Writer).Commit(s.Conn) }

// WatchCommits implements [connection].
func (s *socket) WatchCommits(ctx context.Context, interval time.Duration, check func(context.Context) error, failed func(error)) error {
	return nfnl.WatchCommits(ctx, s.ns.File(), interval, check, failed)
}

// Close implements [connection].
func (s *socket) Close() error {
	if s.route != nil {
		s.route.Close()
	}
	if s.ns != nil {
		s.ns.Close()
	}
	return s.Conn.Close()
}
