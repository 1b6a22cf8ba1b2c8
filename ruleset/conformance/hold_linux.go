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
)

// heldEach is how many connections [World.Hold] opens to a target from each place.
const heldEach = 3

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
// back. The error joins one for each connection that is broken; nil is none.
func (h *Held) Check() error {
	var errs []error
	for _, c := range h.connections {
		if err := c.echo(); err != nil {
			errs = append(errs, fmt.Errorf("open connection from %s to %s, served by %s: %w", c.from, c.to, c.server, err))
		}
	}
	return errors.Join(errs...)
}

// connection is one that stays open.
type connection struct {
	net.Conn
	r      *bufio.Reader
	from   string
	to     netip.AddrPort
	server netip.AddrPort
	n      int
}

// open connects over TCP, and fails the test if it cannot.
func (w *World) open(from string, to netip.AddrPort) *connection {
	w.tb.Helper()
	ctx, cancel := context.WithTimeout(w.tb.Context(), patience)
	defer cancel()
	c, r, text, err := w.net.hosts[from].connect(ctx, to)
	if err != nil {
		w.tb.Fatalf("connect from %s to %s: %v", from, to, err)
	}
	w.tb.Cleanup(func() { c.Close() })
	return &connection{Conn: c, r: r, from: from, to: to, server: parseGreeting(text).server}
}

// echo has the server send back a line.
func (c *connection) echo() error {
	c.n++
	c.SetDeadline(time.Now().Add(patience))
	want := fmt.Sprintf("line %d\n", c.n)
	if _, err := c.Write([]byte(want)); err != nil {
		return err
	}
	got, err := c.r.ReadString('\n')
	if err == nil && got != want {
		err = fmt.Errorf("got %q for %q", got, want)
	}
	return err
}
