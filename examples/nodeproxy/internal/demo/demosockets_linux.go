package demo

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"time"

	"github.com/go-proxier/proxier/examples/internal/node/config"
	"github.com/go-proxier/proxier/examples/internal/node/core"
	"github.com/go-proxier/proxier/examples/internal/threadcgroup"
	"github.com/go-proxier/proxier/examples/nodeproxy/internal/lab"
	"github.com/go-proxier/proxier/examples/socketlb"
	"github.com/go-proxier/proxier/internal/testing/netlab"
	"github.com/go-proxier/proxier/internal/testing/testtime"
)

// demoCgroup is the cgroup of node-1 and its pods in the demo with --socket-lb. Its methods
// do nothing for nil.
type demoCgroup struct {
	parent   *threadcgroup.Parent
	group    *threadcgroup.Group
	dir      string
	closeDir func() error
	backend  *socketlb.Backend
}

// demoSockets runs the verb demo with --socket-lb. The kernel loads the programs only in the
// initial user namespace, so it creates only network namespaces.
func demoSockets(ctx context.Context, mode string, hold bool, out, diag io.Writer) int {
	c, err := newDemoCgroup(ctx)
	if err != nil {
		fmt.Fprintf(diag, `nodeproxy demo: %v
With --socket-lb the demo loads BPF programs for a cgroup that it creates. It needs root in
the initial user namespace, and a writable cgroup2 file system. Without --socket-lb it
needs no privileges.
`, err)
		return ExitNoSpaces
	}
	defer func() {
		if err := c.close(); err != nil {
			fmt.Fprintf(diag, "nodeproxy demo: %v\n", err)
		}
	}()
	t, err := newTour(mode, out, diag)
	if err != nil {
		fmt.Fprintf(diag, "nodeproxy demo: %v\n", err)
		return ExitNoSpaces
	}
	t.sockets = c
	for _, h := range []*netlab.Host{t.Node, t.Pod1, t.Pod2} {
		h.Around = c.group.Do
	}
	return t.show(ctx, hold)
}

func newDemoCgroup(ctx context.Context) (_ *demoCgroup, err error) {
	c := &demoCgroup{}
	defer func() {
		if err != nil {
			err = errors.Join(err, c.close())
		}
	}()
	if c.dir, c.closeDir, err = socketlb.TemporaryDir(); err != nil {
		return nil, err
	}
	root, err := socketlb.RootCgroup()
	if err != nil {
		return nil, err
	}
	if err := socketlb.Probe(ctx, socketlb.Config{Dir: c.dir, Cgroup: root}); err != nil {
		return nil, err
	}
	if c.parent, err = threadcgroup.NewParent(root); err != nil {
		return nil, err
	}
	c.group, err = c.parent.New()
	return c, err
}

func (c *demoCgroup) close() (err error) {
	if c.group != nil {
		err = errors.Join(err, socketlb.Cleanup(context.Background(), socketlb.Config{Dir: c.dir}), c.group.Close())
	}
	if c.parent != nil {
		err = errors.Join(err, c.parent.Close())
	}
	if c.closeDir != nil {
		err = errors.Join(err, c.closeDir())
	}
	return err
}

// configure makes the agent use the cgroup.
func (c *demoCgroup) configure(cfg *config.Config) {
	if c != nil {
		cfg.SocketLB = config.SocketLB{Enabled: true, Cgroup: c.group.Path(), Dir: c.dir}
	}
}

// follow stores the agent, whose counters count reads.
func (c *demoCgroup) follow(a *core.Agent) {
	if c != nil {
		c.backend, _ = a.Sockets.(*socketlb.Backend)
	}
}

// wait waits until the programs are attached, which is after the rules are in effect.
func (c *demoCgroup) wait(ctx context.Context) error {
	if c == nil {
		return nil
	}
	for start := time.Now(); ; time.Sleep(time.Millisecond) {
		switch err := c.backend.Check(ctx); {
		case err == nil:
			return nil
		case ctx.Err() != nil:
			return errStopped
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

// count expects that this number of connections of pods was translated at the socket.
func (c *demoCgroup) count(t *tour, pods uint64) {
	if c == nil {
		return
	}
	n, err := c.backend.Counters()
	t.expect(err == nil && n.Pods == pods, "%d connections of pods were translated at the socket", n.Pods)
}
