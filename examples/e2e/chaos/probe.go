//go:build linux

package main

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"time"

	"golang.org/x/sys/unix"
	v1 "k8s.io/api/core/v1"

	"github.com/go-proxier/proxier/internal/testing/netlab"
	"github.com/go-proxier/proxier/ruleset"
)

// target is the destination of a connection.
type target struct {
	to    netip.AddrPort
	proto v1.Protocol
}

// attempt is a connection to be made. The version was known to be in effect when the attempt was chosen.
type attempt struct {
	target
	from *place
	v    *version
	ruleset.Verdict
}

func newAttempt(from *place, t target, v *version) attempt {
	return attempt{t, from, v, v.trace(from, t)}
}

func (a attempt) String() string { return fmt.Sprintf("%s %s from %s", a.proto, a.to, a.from.name) }

// outcome is the result of a connection attempt or of a request.
type outcome struct {
	netlab.Outcome
	begun time.Time
	// lost is the number of packets without an answer before the connection was accepted or refused.
	lost int
}

func (o outcome) String() string {
	s := o.Outcome.String()
	if o.lost > 0 {
		s += fmt.Sprintf(", after %d packets were lost", o.lost)
	}
	return fmt.Sprintf("%s after %v", s, time.Since(o.begun).Round(time.Millisecond))
}

const (
	// connectTimeout bounds a connection that must be accepted or refused.
	connectTimeout = 20 * time.Second
	// silenceTimeout bounds a connection that must get no answer.
	silenceTimeout = 250 * time.Millisecond
)

// timeout returns how long to wait for an answer.
func (a attempt) timeout() time.Duration {
	if a.Action == ruleset.ActionDrop || a.Action == ruleset.ActionPass || a.Action == ruleset.ActionForward && dead(a.Port) {
		return silenceTimeout
	}
	return connectTimeout
}

// probe makes one connection and closes it.
func (a attempt) probe(ctx context.Context) outcome {
	if a.proto == v1.ProtocolTCP {
		c, o := a.connect(ctx)
		if c != nil {
			c.Close()
		}
		return o
	}
	begun := time.Now()
	c, err := a.dialUDP(ctx)
	if err != nil {
		return outcome{Outcome: outcomeOf("", err), begun: begun}
	}
	defer c.Close()
	return ask(ctx, c, a.timeout())
}

// connect opens a TCP connection and reads the server's greeting. c is nil without a greeting.
func (a attempt) connect(ctx context.Context) (c *netlab.Lines, o outcome) {
	ctx, cancel := context.WithTimeout(ctx, a.timeout())
	defer cancel()
	var conn *net.TCPConn
	o.begun = time.Now()
	err := a.bind(func(from netip.AddrPort) (err error) {
		conn, o.lost, err = a.from.host.DialTCP(ctx, from, a.to)
		return err
	})
	greeting := ""
	if err == nil {
		c, greeting, err = netlab.ReceiveGreeting(ctx, conn)
	}
	o.Outcome = outcomeOf(greeting, err)
	return c, o
}

func (a attempt) dialUDP(ctx context.Context) (c net.Conn, err error) {
	err = a.bind(func(from netip.AddrPort) (err error) {
		c, err = a.from.host.Dial(ctx, "udp", from.String(), a.to.String())
		return err
	})
	return c, err
}

// bind calls dial with a source address and port that the place has not used recently, a few times if ports
// are in use. For a while the node's connection tracking sends packets from a used port to the same endpoint.
func (a attempt) bind(dial func(from netip.AddrPort) error) (err error) {
	const first, count = 10000, 19000 // below the first NodePort
	for range 10 {
		from := netip.AddrPortFrom(a.from.own(a.to.Addr()), uint16(first+a.from.ports.Add(1)%count))
		if err = dial(from); !errors.Is(err, unix.EADDRINUSE) {
			break
		}
	}
	return err
}

// outcomeOf returns the outcome of a connection with its greeting or its error. Without a rule the
// node sends a packet to the network of its address, where no host answers. That is silence, even if
// the search for a neighbor ends before the client's patience.
func outcomeOf(greeting string, err error) netlab.Outcome {
	o := netlab.OutcomeOf(greeting, err)
	if errors.Is(err, unix.EHOSTUNREACH) {
		o.Kind = netlab.Silent
	}
	return o
}

// ask sends one datagram and waits for the answer.
func ask(ctx context.Context, c net.Conn, wait time.Duration) outcome {
	o := outcome{begun: time.Now()}
	c.SetDeadline(o.begun.Add(wait))
	defer context.AfterFunc(ctx, func() { c.SetDeadline(time.Now()) })()
	buf, n := make([]byte, 200), 0
	// A sender on the node itself gets EPERM for a dropped or refused packet. The socket
	// reports a refusal next.
	_, err := c.Write([]byte("hello\n"))
	if err == nil || errors.Is(err, unix.EPERM) {
		n, err = c.Read(buf)
	}
	o.Outcome = outcomeOf(string(buf[:n]), err)
	return o
}
