package conformance

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
	"github.com/go-proxier/proxier/tracker"
)

// silence is the time to wait for a connection that must get no reply. Others get [testtime.Timeout]. A TCP
// connection whose first packet gets no answer fails even so, unless the machine stalled.
const silence = 250 * time.Millisecond

type outcome struct {
	netlab.Outcome
	// notSent reports whether sending failed with EPERM.
	notSent bool
}

func (o outcome) String() string {
	if o.notSent && o.Kind != netlab.Reached && o.Kind != netlab.Failed {
		return o.Outcome.String() + ", sending failed with EPERM"
	}
	return o.Outcome.String()
}

func (h host) probe(ctx context.Context, proto v1.Protocol, to netip.AddrPort, wait time.Duration) outcome {
	ctx, cancel := context.WithTimeout(ctx, wait)
	defer cancel()
	var text string
	var err error
	switch proto {
	case v1.ProtocolTCP:
		text, err = h.probeTCP(ctx, to)
	case v1.ProtocolUDP:
		text, err = h.probeUDP(ctx, h.port(), to)
	case v1.ProtocolSCTP:
		text, err = h.probeSCTP(ctx, to)
	}
	return outcomeOf(text, err)
}

func outcomeOf(text string, err error) outcome {
	return outcome{netlab.OutcomeOf(text, err), errors.Is(err, unix.EPERM)}
}

// local returns the host's source address, with a port or 0.
func (h host) local(to netip.AddrPort, port uint16) string {
	return netip.AddrPortFrom(address(h.name, tracker.FamilyOf(to.Addr())), port).String()
}

// errLost means that the first packet of a connection got no answer, and only a retransmission did.
var errLost = errors.New("the first packet was lost")

func (h host) connect(ctx context.Context, to netip.AddrPort) (*netlab.Lines, string, error) {
	c, err := h.dialTCP(ctx, to)
	if err != nil {
		return nil, "", err
	}
	return netlab.ReceiveGreeting(ctx, c)
}

// dialTCP opens a TCP connection. If its first packet gets no answer, dialTCP fails with errLost
// unless the machine stalled.
func (h host) dialTCP(ctx context.Context, to netip.AddrPort) (*net.TCPConn, error) {
	begun := time.Now()
	var conn *net.TCPConn
	var lost int
	from := address(h.name, tracker.FamilyOf(to.Addr()))
	err := h.open(func() (err error) {
		for range portCount {
			conn, lost, err = h.ns.DialTCP(ctx, netip.AddrPortFrom(from, h.tcpPort()), to)
			if !errors.Is(err, unix.EADDRINUSE) {
				break
			}
		}
		return err
	})
	if err != nil && !errors.Is(err, unix.ECONNREFUSED) {
		return nil, err
	}
	h.excuses.connections.Add(1)
	switch {
	case lost == 0:
		return conn, err
	case h.stalls.Since(begun):
		h.excuses.excused.Add(1)
		return conn, err
	case err != nil:
		return nil, fmt.Errorf("%w, a later one refused", errLost)
	}
	conn.Close()
	return nil, errLost
}

func (h host) probeTCP(ctx context.Context, to netip.AddrPort) (string, error) {
	c, text, err := h.connect(ctx, to)
	if err != nil {
		return "", err
	}
	return text, c.Close()
}

func (h host) probeUDP(ctx context.Context, port uint16, to netip.AddrPort) (string, error) {
	var c net.Conn
	err := h.open(func() (err error) {
		c, err = h.ns.Dial(ctx, "udp", h.local(to, port), to.String())
		return err
	})
	if err != nil {
		return "", err
	}
	defer c.Close()
	var text string
	// A refused socket sends again: address translation sees only the first packet of
	// a flow, and the others must be refused too.
	for range 3 {
		text, err = ask(ctx, c.(packetConn), []byte("hello\n"), func(b []byte) (string, bool) {
			return string(b), true
		})
		if !errors.Is(err, unix.ECONNREFUSED) {
			break
		}
	}
	return text, err
}

// packetConn is a connected socket. Only ReadFrom removes the IP header from packets
// of a raw socket.
type packetConn interface {
	net.Conn
	net.PacketConn
}

// ask sends one packet and returns the first valid reply. If sending failed with
// EPERM, the error wraps that and the next error of the socket.
func ask(ctx context.Context, c packetConn, packet []byte, isAnswer func([]byte) (string, bool)) (string, error) {
	if deadline, ok := ctx.Deadline(); ok {
		c.SetDeadline(deadline)
	}
	// A sender on the node itself may get EPERM for a dropped packet. If the packet
	// was refused, the socket's next error reports that.
	_, notSent := c.Write(packet)
	if notSent != nil && !errors.Is(notSent, unix.EPERM) {
		return "", notSent
	}
	buf := make([]byte, 1500)
	for {
		n, _, err := c.ReadFrom(buf)
		if err != nil {
			return "", errors.Join(err, notSent)
		}
		if text, ok := isAnswer(buf[:n]); ok {
			return text, nil
		}
	}
}
