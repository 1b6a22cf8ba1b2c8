//go:build linux

package main

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"strings"
	"time"

	"golang.org/x/sys/unix"
	v1 "k8s.io/api/core/v1"

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
	begun time.Time
	kind  outcomeKind
	// server is the address that answered, and source the client address that it saw.
	server netip.AddrPort
	source netip.Addr
	// lost is the number of packets without an answer before the connection was accepted or refused.
	lost int
	err  error
}

type outcomeKind string

const (
	reached outcomeKind = "reached"
	refused outcomeKind = "refused"
	silent  outcomeKind = "no answer"
	failed  outcomeKind = "failed"
)

func (o outcome) String() string {
	s := string(o.kind)
	switch {
	case o.kind == reached:
		s += fmt.Sprintf(" %s with source %s", o.server, o.source)
	case o.err != nil:
		s += fmt.Sprintf(" (%v)", o.err)
	}
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

// patience returns how long to wait for an answer.
func patience(v ruleset.Verdict) time.Duration {
	if v.Action == ruleset.ActionDrop || v.Action == ruleset.ActionPass {
		return silenceTimeout
	}
	return connectTimeout
}

// probe makes one connection and closes it.
func (p *place) probe(ctx context.Context, t target, wait time.Duration) outcome {
	ctx, cancel := context.WithTimeout(ctx, wait)
	defer cancel()
	if t.proto == v1.ProtocolTCP {
		c, _, o := p.connect(ctx, t.to)
		if c != nil {
			c.Close()
		}
		return o
	}
	o := outcome{begun: time.Now()}
	c, err := p.dialUDP(ctx, t.to)
	if err != nil {
		o.finish("", err) // a slow machine may need all of the time for this
		return o
	}
	defer c.Close()
	return ask(c, wait)
}

// finish fills in the outcome from the server's greeting or the error.
func (o *outcome) finish(text string, err error) {
	if err == nil {
		self, peer, _ := strings.Cut(strings.TrimSpace(text), " ")
		var source netip.AddrPort
		if o.server, err = netip.ParseAddrPort(self); err == nil {
			source, err = netip.ParseAddrPort(peer)
		}
		o.source = source.Addr()
	}
	var timeout net.Error
	switch o.err = err; {
	case err == nil:
		o.kind = reached
	case errors.Is(err, unix.ECONNREFUSED):
		o.kind = refused
	case errors.Is(err, os.ErrDeadlineExceeded), errors.As(err, &timeout) && timeout.Timeout():
		o.kind = silent
	default:
		o.kind = failed
	}
}

// connect opens a TCP connection and reads the server's greeting. c is nil unless the server is
// reached.
func (p *place) connect(ctx context.Context, to netip.AddrPort) (c *net.TCPConn, r *bufio.Reader, o outcome) {
	o.begun = time.Now()
	var err error
	for range sourcePorts {
		if c, o.lost, err = p.host.DialTCP(ctx, p.local(to), to); !errors.Is(err, unix.EADDRINUSE) {
			break
		}
	}
	var text string
	if err == nil {
		// Close resets the connection, so no socket stays in TIME_WAIT.
		c.SetLinger(0)
		deadline, _ := ctx.Deadline()
		c.SetDeadline(deadline)
		r = bufio.NewReader(c)
		text, err = r.ReadString('\n')
	}
	if o.finish(text, err); o.kind != reached && c != nil {
		c.Close()
		c = nil
	}
	return c, r, o
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
func ask(c net.Conn, wait time.Duration) outcome {
	o := outcome{begun: time.Now()}
	c.SetDeadline(o.begun.Add(wait))
	buf, n := make([]byte, 200), 0
	// A sender on the node itself gets EPERM for a dropped or refused packet. The socket
	// reports a refusal next.
	_, err := c.Write([]byte("hello\n"))
	if err == nil || errors.Is(err, unix.EPERM) {
		n, err = c.Read(buf)
	}
	o.finish(string(buf[:n]), err)
	return o
}
