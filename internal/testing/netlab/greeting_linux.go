package netlab

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// Serve calls handle for each connection that l accepts, on a goroutine of its own, and closes the
// connection when handle returns or l is closed. It returns when l is closed.
func Serve(l net.Listener, handle func(net.Conn)) {
	ctx, end := context.WithCancel(context.Background())
	defer end()
	for {
		c, err := l.Accept()
		if err != nil {
			return
		}
		go func() {
			defer c.Close()
			defer context.AfterFunc(ctx, func() { c.Close() })()
			handle(c)
		}()
	}
}

// ServePackets answers each datagram with what answer returns for its sender. It returns when c is
// closed. A client that gets no answer notices that itself.
func ServePackets(c net.PacketConn, answer func(from netip.AddrPort) []byte) {
	buf := make([]byte, 100)
	for {
		_, from, err := c.ReadFrom(buf)
		if err != nil {
			return
		}
		_, _ = c.WriteTo(answer(from.(*net.UDPAddr).AddrPort()), from)
	}
}

// Greeting returns the line that a server sends to a client for a new connection or for a
// datagram: its own address and the client's as the server sees them, such as
// "10.244.1.11:8080 192.0.2.10:40000".
func Greeting(self, peer netip.AddrPort) []byte {
	unmap := func(a netip.AddrPort) netip.AddrPort { return netip.AddrPortFrom(a.Addr().Unmap(), a.Port()) }
	return fmt.Appendf(nil, "%s %s\n", unmap(self), unmap(peer))
}

// Greet serves a TCP connection: it sends the greeting, and then sends back what it receives until
// the client closes the connection.
func Greet(c net.Conn) {
	self, peer := c.LocalAddr().(*net.TCPAddr), c.RemoteAddr().(*net.TCPAddr)
	if _, err := c.Write(Greeting(self.AddrPort(), peer.AddrPort())); err == nil {
		io.Copy(c, c)
	}
}

// Serve starts a TCP and a UDP server at addresses, which must be literal. They end with the [Lab], and
// starting them is a step of it.
func (h *Host) Serve(tcp string, handle func(net.Conn), udp string, answer func(from netip.AddrPort) []byte) {
	h.lab.Do(func() error {
		l, err := h.Listen("tcp", tcp)
		if err != nil {
			return err
		}
		h.lab.servers = append(h.lab.servers, l)
		go Serve(l, handle)
		c, err := h.ListenPacket("udp", udp)
		if err != nil {
			return err
		}
		h.lab.servers = append(h.lab.servers, c)
		go ServePackets(c, answer)
		return nil
	})
}

// Greet is Serve with servers that greet, at the same address.
func (h *Host) Greet(at netip.AddrPort) {
	h.Serve(at.String(), Greet, at.String(), func(from netip.AddrPort) []byte { return Greeting(at, from) })
}

// Outcome is the result of a connection to a server that greets, or of a datagram to it.
type Outcome struct {
	Kind OutcomeKind
	// Server is the address that responded and Source the client address that it saw, if it
	// was reached.
	Server netip.AddrPort
	Source netip.Addr
	// Err is the cause of any other outcome.
	Err error
}

// OutcomeKind is a kind of [Outcome].
type OutcomeKind string

// The kinds of outcomes. A connection that is Silent got no answer in time.
const (
	Reached OutcomeKind = "reached"
	Refused OutcomeKind = "refused"
	Silent  OutcomeKind = "no answer"
	Failed  OutcomeKind = "failed"
)

// OutcomeOf returns the outcome of a connection with its greeting or its error.
func OutcomeOf(greeting string, err error) Outcome {
	var o Outcome
	if err == nil {
		var source netip.AddrPort
		var err2 error
		self, peer, _ := strings.Cut(strings.TrimSpace(greeting), " ")
		o.Server, err = netip.ParseAddrPort(self)
		source, err2 = netip.ParseAddrPort(peer)
		if err = errors.Join(err, err2); err != nil {
			err = fmt.Errorf("unexpected reply %q: %w", greeting, err)
		}
		o.Source = source.Addr()
	}
	var timeout net.Error
	switch o.Err = err; {
	case err == nil:
		o.Kind = Reached
	case errors.Is(err, unix.ECONNREFUSED):
		o.Kind = Refused
	case errors.Is(err, os.ErrDeadlineExceeded), errors.As(err, &timeout) && timeout.Timeout():
		o.Kind = Silent
	default:
		o.Kind = Failed
	}
	return o
}

// String describes the outcome in a few words.
func (o Outcome) String() string {
	switch o.Kind {
	case Reached:
		return fmt.Sprintf("reached %s with source %s", o.Server, o.Source)
	case Failed:
		return fmt.Sprintf("failed: %v", o.Err)
	}
	return string(o.Kind)
}

// Lines is an open TCP connection to a server that greets. Closing it resets it, so that no port
// stays in TIME_WAIT, neither here nor in a node's connection tracking. It is not safe for
// concurrent use.
type Lines struct {
	net.Conn
	r *bufio.Reader
	// sent and received count lines.
	sent, received int
}

// ReceiveGreeting returns the connection and its greeting. It closes the connection if it does not
// get one before ctx ends.
func ReceiveGreeting(ctx context.Context, c *net.TCPConn) (l *Lines, greeting string, err error) {
	l = &Lines{Conn: c, r: bufio.NewReader(c)}
	if err = c.SetLinger(0); err == nil {
		deadline, _ := ctx.Deadline()
		c.SetDeadline(deadline)
		greeting, err = l.r.ReadString('\n')
		c.SetDeadline(time.Time{})
	}
	if err != nil {
		c.Close()
		return nil, "", err
	}
	return l, greeting, nil
}

// Send sends a line, which the server will send back.
func (l *Lines) Send(deadline time.Time) error {
	l.sent++
	l.SetDeadline(deadline)
	_, err := fmt.Fprintf(l, "line %d\n", l.sent)
	return err
}

// Echo sends a line and waits for the server to send it back, and all earlier ones.
func (l *Lines) Echo(deadline time.Time) error {
	if err := l.Send(deadline); err != nil {
		return err
	}
	for l.received < l.sent {
		want := fmt.Sprintf("line %d\n", l.received+1)
		got, err := l.r.ReadString('\n')
		if err != nil {
			return err
		}
		if got != want {
			return fmt.Errorf("got %q for %q", got, want)
		}
		l.received++
	}
	return nil
}
