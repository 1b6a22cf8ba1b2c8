package demo

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"time"

	"github.com/go-proxier/proxier/examples/internal/threadcgroup"
	"github.com/go-proxier/proxier/examples/nodeproxy/internal/lab"
	"github.com/go-proxier/proxier/examples/socketlb"
	"github.com/go-proxier/proxier/internal/testing/netlab"
	"github.com/go-proxier/proxier/internal/testing/testtime"
)

// demoCgroup is the cgroup of node-1 and its pods in the demo with --socket-lb.
type demoCgroup struct {
	group   *threadcgroup.Group
	dir     string
	backend *socketlb.Backend
	ends    []func() error // to call in reverse order
}

const needsPrograms = `With --socket-lb the demo loads BPF programs for a cgroup that it creates. It needs root in
the initial user namespace, and a writable cgroup2 file system. Without --socket-lb it
needs no privileges.
`

func newDemoCgroup(ctx context.Context) (_ *demoCgroup, err error) {
	c := &demoCgroup{}
	defer func() {
		if err != nil {
			err = errors.Join(err, c.close())
		}
	}()
	dir, closeDir, err := socketlb.TemporaryDir()
	if err != nil {
		return nil, err
	}
	c.dir, c.ends = dir, append(c.ends, closeDir)
	root, err := socketlb.RootCgroup()
	if err != nil {
		return nil, err
	}
	if err := socketlb.Probe(ctx, socketlb.Config{Dir: c.dir, Cgroup: root}); err != nil {
		return nil, err
	}
	parent, err := threadcgroup.NewParent(root)
	if err != nil {
		return nil, err
	}
	c.ends = append(c.ends, parent.Close)
	if c.group, err = parent.New(); err != nil {
		return nil, err
	}
	c.ends = append(c.ends, c.group.Close, func() error {
		return socketlb.Cleanup(context.Background(), socketlb.Config{Dir: c.dir})
	})
	return c, nil
}

func (c *demoCgroup) close() (err error) {
	for _, end := range slices.Backward(c.ends) {
		err = errors.Join(err, end())
	}
	return err
}

// wait waits until the programs are attached, which is after the rules are in effect.
func (c *demoCgroup) wait(ctx context.Context) error {
	for start := time.Now(); ; time.Sleep(time.Millisecond) {
		switch err := c.backend.Check(ctx); {
		case err == nil:
			return nil
		case ctx.Err() != nil:
			return ctx.Err()
		case time.Since(start) > testtime.Timeout:
			return err
		}
	}
}

// unconnected returns a talk over an unconnected UDP socket.
func unconnected(h *netlab.Host, to string) (*lab.Talk, error) {
	addr, err := netip.ParseAddrPort(to)
	if err != nil {
		return nil, err
	}
	any := "0.0.0.0:0"
	if addr.Addr().Is6() {
		any = "[::]:0"
	}
	c, err := h.ListenPacket("udp", any)
	if err != nil {
		return nil, err
	}
	return lab.NewTalk(datagrams{c.(*net.UDPConn), addr}), nil
}

// datagrams is a connection over an unconnected UDP socket.
type datagrams struct {
	*net.UDPConn
	to netip.AddrPort
}

// Write sends a datagram with sendmsg(2).
func (d datagrams) Write(b []byte) (int, error) { return d.WriteToUDPAddrPort(b, d.to) }

// Read returns a datagram's data. It returns an error for one from another address.
func (d datagrams) Read(b []byte) (int, error) {
	n, from, err := d.ReadFromUDPAddrPort(b)
	if from = netip.AddrPortFrom(from.Addr().Unmap(), from.Port()); err == nil && from != d.to {
		err = fmt.Errorf("a datagram from %s, not from %s", from, d.to)
	}
	return n, err
}
