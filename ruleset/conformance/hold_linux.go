package conformance

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"time"

	v1 "k8s.io/api/core/v1"

	"github.com/go-proxier/proxier/internal/testing/netlab"
	"github.com/go-proxier/proxier/internal/testing/testtime"
)

const (
	// heldEach is the number of connections that [World.Hold] opens to a target from
	// each host.
	heldEach = 3
	// heldTimeout is the time to wait for the replies of all connections: longer than the longest TCP retransmission
	// timeout, two minutes (TCP_RTO_MAX in include/net/tcp.h).
	heldTimeout = 150 * time.Second
)

// Held holds open connections. [World.Hold] makes it. It is not safe for concurrent
// use.
type Held struct{ connections []*connection }

// Hold opens TCP connections that stay open until the test ends, a few from an external client and a few from a local
// pod to each TCP target, and fails the test if it cannot. [Held.Check] checks that those to endpoints that still
// serve keep working.
func (w *World) Hold(to []Target) *Held {
	w.tb.Helper()
	return w.hold([]string{"client1", "pod1"}, heldEach, to)
}

func (w *World) hold(hosts []string, each int, to []Target) *Held {
	w.tb.Helper()
	h := &Held{}
	for _, from := range hosts {
		for _, t := range to {
			if t.Protocol != v1.ProtocolTCP {
				continue
			}
			for range each {
				h.connections = append(h.connections, w.open(from, t.Addr))
			}
		}
	}
	return h
}

// Len returns the number of connections.
func (h *Held) Len() int { return len(h.connections) }

// Check sends a line through every connection and waits until the server has sent it
// back, for some minutes at most in total. The error joins one for each broken
// connection. It is nil if there are none.
func (h *Held) Check() error {
	deadline := time.Now().Add(heldTimeout)
	return h.each(func(c *connection) error { return c.Echo(deadline) })
}

// Send sends a line through every connection without waiting for the reply, for which the next [Held.Check] waits.
// The error joins one for each connection that is already broken.
func (h *Held) Send() error {
	return h.each(func(c *connection) error { return c.Send(time.Now().Add(testtime.Timeout)) })
}

func (h *Held) each(f func(*connection) error) error {
	var errs []error
	for _, c := range h.connections {
		if err := f(c); err != nil {
			errs = append(errs, fmt.Errorf("open connection from %s to %s, served by %s: %w", c.from, c.to, c.server, err))
		}
	}
	return errors.Join(errs...)
}

// Split returns the connections in which the server does not see the client's own
// address, and the others. Both share their connections with h.
func (h *Held) Split() (masqueraded, others *Held) {
	masqueraded, others = &Held{}, &Held{}
	for _, c := range h.connections {
		if c.source == c.client {
			others.connections = append(others.connections, c)
		} else {
			masqueraded.connections = append(masqueraded.connections, c)
		}
	}
	return masqueraded, others
}

type connection struct {
	*netlab.Lines
	from   string
	to     netip.AddrPort
	server netip.AddrPort
	// client is the client's address, and source the address that the server sees.
	client, source netip.Addr
}

func (w *World) open(from string, to netip.AddrPort) *connection {
	w.tb.Helper()
	ctx, cancel := context.WithTimeout(w.tb.Context(), w.lab().timeout())
	defer cancel()
	c, text, err := w.lab().net.hosts[from].connect(ctx, to)
	if err != nil {
		w.tb.Fatalf("connect from %s to %s: %v", from, to, err)
	}
	w.tb.Cleanup(func() { c.Close() })
	o, client := netlab.OutcomeOf(text, nil), c.LocalAddr().(*net.TCPAddr).AddrPort().Addr().Unmap()
	return &connection{Lines: c, from: from, to: to, server: o.Server, client: client, source: o.Source}
}
