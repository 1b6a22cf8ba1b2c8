package conformance

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"time"

	v1 "k8s.io/api/core/v1"

	"github.com/go-proxier/proxier/internal/testtime"
)

const (
	// heldEach is how many connections [World.Hold] opens to a target from each place.
	heldEach = 3
	// heldTimeout is how long is waited for the answers of all of them: longer than
	// TCP ever takes to repeat what it has sent while the way was cut off, two minutes
	// (TCP_RTO_MAX of include/net/tcp.h).
	heldTimeout = 150 * time.Second
)

// Held is connections that stay open. It is made by [World.Hold] and used by one
// goroutine at a time.
type Held struct{ connections []*connection }

// Hold opens TCP connections that stay open until the test ends, a few from a
// client outside and a few from a local pod to each TCP target; UDP targets are
// passed over. Whatever a data plane does afterwards, those to endpoints that go
// on serving must live: [Held.Check] tells. It fails the test if one does not come
// about.
func (w *World) Hold(to []Target) *Held {
	w.tb.Helper()
	h := &Held{}
	for _, from := range []string{"client1", "pod1"} {
		for _, t := range to {
			if t.Protocol != v1.ProtocolTCP {
				continue
			}
			for range heldEach {
				h.connections = append(h.connections, w.open(from, t.Addr))
			}
		}
	}
	return h
}

// Len returns how many connections there are.
func (h *Held) Len() int { return len(h.connections) }

// Check sends a line through every connection and waits for the server to send it
// back, some minutes at most for all of them. The error joins one for each connection
// that is broken; nil is none.
func (h *Held) Check() error {
	var errs []error
	deadline := time.Now().Add(heldTimeout)
	for _, c := range h.connections {
		if err := c.echo(deadline); err != nil {
			errs = append(errs, fmt.Errorf("open connection from %s to %s, served by %s: %w", c.from, c.to, c.server, err))
		}
	}
	return errors.Join(errs...)
}

// Send sends a line through every connection and does not wait for the answer, which
// the next [Held.Check] does: so there is traffic while something is amiss that is
// put right before the clients give up. The error joins one for each connection that
// is broken already.
func (h *Held) Send() error {
	var errs []error
	for _, c := range h.connections {
		if err := c.send(time.Now().Add(testtime.Timeout)); err != nil {
			errs = append(errs, fmt.Errorf("open connection from %s to %s, served by %s: %w", c.from, c.to, c.server, err))
		}
	}
	return errors.Join(errs...)
}

// Split returns those connections in which the server does not see the client's own
// address, and the others. They are the same ones: a line through one of them is one
// through one of h.
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

// connection is one that stays open.
type connection struct {
	net.Conn
	r      *bufio.Reader
	from   string
	to     netip.AddrPort
	server netip.AddrPort
	// client is the client's address, and source what the server sees of it.
	client, source netip.Addr
	// sent and received are numbers of lines.
	sent, received int
}

// open connects over TCP, and fails the test if it cannot.
func (w *World) open(from string, to netip.AddrPort) *connection {
	w.tb.Helper()
	ctx, cancel := context.WithTimeout(w.tb.Context(), w.timeout())
	defer cancel()
	c, r, text, err := w.net.hosts[from].connect(ctx, to)
	if err != nil {
		w.tb.Fatalf("connect from %s to %s: %v", from, to, err)
	}
	w.tb.Cleanup(func() { c.Close() })
	o, client := parseGreeting(text), c.LocalAddr().(*net.TCPAddr).AddrPort().Addr().Unmap()
	return &connection{Conn: c, r: r, from: from, to: to, server: o.server, client: client, source: o.source}
}

// send has the server asked to send back a line.
func (c *connection) send(deadline time.Time) error {
	c.sent++
	c.SetDeadline(deadline)
	_, err := fmt.Fprintf(c, "line %d\n", c.sent)
	return err
}

// echo has the server send back a line, and all that it was asked for before.
func (c *connection) echo(deadline time.Time) error {
	if err := c.send(deadline); err != nil {
		return err
	}
	for c.received < c.sent {
		want := fmt.Sprintf("line %d\n", c.received+1)
		got, err := c.r.ReadString('\n')
		if err != nil {
			return err
		}
		if got != want {
			return fmt.Errorf("got %q for %q", got, want)
		}
		c.received++
	}
	return nil
}
