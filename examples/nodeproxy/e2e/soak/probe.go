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
	"slices"
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

// probe makes one connection and closes it.
func (p *place) probe(ctx context.Context, t target, wait time.Duration) outcome {
	o := outcome{begun: time.Now()}
	ctx, cancel := context.WithTimeout(ctx, wait)
	defer cancel()
	var text string
	if t.proto == v1.ProtocolUDP {
		var c net.Conn
		if c, o.err = p.dialUDP(ctx, t.to); o.err == nil {
			text, o.err = ask(c, time.Now().Add(wait))
			c.Close()
		}
	} else {
		var c net.Conn
		if c, _, text, o.lost, o.err = p.connect(ctx, t.to); o.err == nil {
			o.err = c.Close()
		}
	}
	o.finish(text)
	return o
}

// finish fills in the outcome from the server's greeting or the error.
func (o *outcome) finish(text string) {
	var timeout net.Error
	switch {
	case o.err == nil:
		self, peer, _ := strings.Cut(text, " ")
		source, err := netip.ParseAddrPort(peer)
		if o.server, o.err = netip.ParseAddrPort(self); o.err == nil {
			o.err = err
		}
		if o.kind, o.source = reached, source.Addr(); o.err != nil {
			o.kind = failed
		}
	case errors.Is(o.err, unix.ECONNREFUSED):
		o.kind = refused
	case errors.Is(o.err, os.ErrDeadlineExceeded), errors.As(o.err, &timeout) && timeout.Timeout():
		o.kind = silent
	default:
		o.kind = failed
	}
}

// connect opens a TCP connection and reads the server's greeting.
func (p *place) connect(ctx context.Context, to netip.AddrPort) (c *net.TCPConn, r *bufio.Reader, text string, lost int, err error) {
	for range 10 {
		c, lost, err = p.host.DialTCP(ctx, p.local(familyOf(to.Addr())), to)
		if !errors.Is(err, unix.EADDRINUSE) {
			break
		}
	}
	if err != nil {
		return nil, nil, "", lost, err
	}
	// Close resets the connection, so no socket stays in TIME_WAIT.
	err = c.SetLinger(0)
	if deadline, ok := ctx.Deadline(); ok {
		c.SetDeadline(deadline)
	}
	r = bufio.NewReader(c)
	if err == nil {
		text, err = r.ReadString('\n')
	}
	if err != nil {
		c.Close()
		return nil, nil, "", lost, err
	}
	c.SetDeadline(time.Time{})
	return c, r, strings.TrimSpace(text), lost, nil
}

func (p *place) dialUDP(ctx context.Context, to netip.AddrPort) (c net.Conn, err error) {
	for range 10 {
		c, err = p.host.Dial(ctx, "udp", p.local(familyOf(to.Addr())).String(), to.String())
		if !errors.Is(err, unix.EADDRINUSE) {
			break
		}
	}
	return c, err
}

// ask sends one datagram and returns the answer.
func ask(c net.Conn, deadline time.Time) (string, error) {
	c.SetDeadline(deadline)
	// A sender on the node itself gets EPERM for a dropped or refused packet. The socket
	// reports a refusal next.
	if _, err := c.Write([]byte("hello\n")); err != nil && !errors.Is(err, unix.EPERM) {
		return "", err
	}
	buf := make([]byte, 200)
	n, err := c.Read(buf)
	return strings.TrimSpace(string(buf[:n])), err
}

// packet returns the first packet of a connection, for [ruleset.Snapshot.Trace].
func (p *place) packet(t target) ruleset.Packet {
	f := familyOf(t.to.Addr())
	return ruleset.Packet{From: p.addr[f], InInterface: p.in, Protocol: t.proto, To: t.to, NodeAddresses: nodeAddresses[f]}
}

// check returns an error unless the outcome of a connection from the place agrees with the
// verdict.
func (p *place) check(o outcome, v ruleset.Verdict) error {
	want := ""
	switch v.Action {
	case ruleset.ActionForward:
		if o.kind != reached {
			want = "must be forwarded"
			break
		}
		for _, ep := range v.Endpoints {
			if ep.Addr != o.server {
				continue
			}
			own := p.addr[familyOf(o.source)]
			switch {
			case v.MasqueradeTo(ep) && !slices.Contains(nodeAddresses[familyOf(o.source)], o.source):
				return fmt.Errorf("%v, must be masqueraded to an address of the node: %s", o, v.Rule)
			case !v.MasqueradeTo(ep) && o.source != own:
				return fmt.Errorf("%v, must keep its source %s: %s", o, own, v.Rule)
			}
			return nil
		}
		return fmt.Errorf("%v, which is not among the %d endpoints allowed: %s", o, len(v.Endpoints), v.Rule)
	case ruleset.ActionReject:
		if o.kind != refused {
			want = "must be refused"
		}
	case ruleset.ActionDrop:
		if o.kind != silent {
			want = "must get no answer"
		}
	case ruleset.ActionPass:
		return nil
	}
	if want != "" {
		return fmt.Errorf("%v, %s: %s", o, want, v.Rule)
	}
	return nil
}
