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

func (t target) String() string { return fmt.Sprintf("%s %s", t.proto, t.to) }

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

// timeoutOf returns how long to wait for an answer.
func timeoutOf(v ruleset.Verdict) time.Duration {
	if v.Action == ruleset.ActionDrop || v.Action == ruleset.ActionPass || v.Action == ruleset.ActionForward && dead(v.Port) {
		return silenceTimeout
	}
	return connectTimeout
}

// probe makes one connection and closes it.
func (p *place) probe(ctx context.Context, t target, wait time.Duration) outcome {
	ctx, cancel := context.WithTimeout(ctx, wait)
	defer cancel()
	if t.proto == v1.ProtocolTCP {
		c, o := p.connect(ctx, t.to)
		if c != nil {
			c.Close()
		}
		return o
	}
	begun := time.Now()
	c, err := p.dialUDP(ctx, t.to)
	if err != nil {
		return outcome{Outcome: outcomeOf("", err), begun: begun} // a slow machine may need all of the time for this
	}
	defer c.Close()
	return ask(ctx, c, wait)
}

// connect opens a TCP connection and reads the server's greeting. c is nil without a greeting.
func (p *place) connect(ctx context.Context, to netip.AddrPort) (c *netlab.Lines, o outcome) {
	o.begun = time.Now()
	var conn *net.TCPConn
	var err error
	for range sourcePorts {
		if conn, o.lost, err = p.host.DialTCP(ctx, p.local(to), to); !errors.Is(err, unix.EADDRINUSE) {
			break
		}
	}
	greeting := ""
	if err == nil {
		c, greeting, err = netlab.ReceiveGreeting(ctx, conn)
	}
	o.Outcome = outcomeOf(greeting, err)
	return c, o
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

// sourcePorts is how many source ports a connection tries.
const sourcePorts = 10

func (p *place) dialUDP(ctx context.Context, to netip.AddrPort) (c net.Conn, err error) {
	for range sourcePorts {
		if c, err = p.host.Dial(ctx, "udp", p.local(to).String(), to.String()); !errors.Is(err, unix.EADDRINUSE) {
			break
		}
	}
	return c, err
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
