package dataplane

import (
	"cmp"
	"context"
	"errors"
	"log/slog"
	"net"
	"net/netip"
	"time"

	v1 "k8s.io/api/core/v1"

	"github.com/go-proxier/proxier/internal/backendconf"
	"github.com/go-proxier/proxier/ruleset"
)

// Config is the configuration of a [Backend]. The zero value listens at addresses that the
// node already has.
type Config struct {
	// Addresses adds the addresses of Services to the node, and lists the node's own
	// addresses. Nil means that the node already has all addresses of Services, and that
	// no address serves NodePorts.
	Addresses Addresses
	// Serves reports whether the Backend serves a frontend of a protocol at an address and
	// port. The Backend calls it for each address of a new or changed Service, and for all
	// Services with each full delta. Nil means that it serves all.
	Serves func(f *ruleset.Frontend, protocol v1.Protocol, at netip.AddrPort) bool
	// Algorithm returns the algorithm of a Service without a hash
	// ([ruleset.Port.Hash]). Nil means [WeightedRoundRobin] for all.
	Algorithm func(*ruleset.Port) Algorithm
	// Dial opens connections to endpoints; network is "tcp" or "udp". Nil means package
	// net. A TCP connection should be a *net.TCPConn.
	Dial func(ctx context.Context, network string, to netip.AddrPort) (net.Conn, error)
	// DialTimeout bounds the dial of one endpoint. 0 means 5 s.
	DialTimeout time.Duration
	// Drain is how long the connections of a removed endpoint may continue. 0 means 30 s. A
	// negative value resets them immediately.
	Drain time.Duration
	// UDPTimeout is the lifetime of a UDP session after its last datagram in either
	// direction. 0 means 60 s.
	UDPTimeout time.Duration
	// MaxConnections is the most TCP connections at a time; 0 means 20,000. A further
	// connection resets the oldest one of the client with the most, at the Service with
	// the most, in the namespace with the most. An IPv6 client is a /48 and its /64s. A
	// connection uses two file descriptors, and on Linux four more while it copies data.
	MaxConnections int
	// MaxSessions is the most UDP sessions at a time, each with a file descriptor; 0 means 5,000. A
	// further session ends one in the same way: the least recently used one of a client.
	MaxSessions int
	// Sockets bounds the listening sockets, each with a file descriptor. Services that need more
	// fail, and Services that have sockets keep them. Nil means no limit.
	Sockets Allowance
	// Refused, if not nil, is called for each TCP connection that is reset before an endpoint
	// accepted it or because of MaxConnections, and for each UDP datagram of a client without a session. It must be safe
	// for concurrent use and return quickly.
	Refused func(protocol v1.Protocol, at netip.AddrPort)
	// Log receives failures, and Services that cannot be served. Length, repetition and rate of
	// messages about Services are bounded as for [tracker.Config].Log. Nil discards.
	Log *slog.Logger
}

// Allowance bounds sockets, which several users may share. Its methods must be safe for concurrent use.
type Allowance interface {
	// Take reports whether another socket may be opened, and counts it.
	Take() bool
	// Give counts a socket as closed.
	Give()
}

// Addresses adds addresses to the node. A Backend calls one method at a time.
type Addresses interface {
	// Own returns the addresses of the node's interfaces, of both families.
	Own() ([]netip.Addr, error)
	// Hold adds an address to the node. Holding an address again, or an address in Own, does
	// nothing and is not an error.
	Hold(netip.Addr) error
	// Release removes a held address. Releasing an address that is not held is not an error.
	Release(netip.Addr) error
	// Held returns the held addresses, including those that an earlier process held.
	Held() ([]netip.Addr, error)
}

// attempts is the most endpoints to try for one connection.
const attempts = 3

// ErrTooManySockets is wrapped by the error of a Service that would need more sockets than
// [Config].Sockets allows.
var ErrTooManySockets = errors.New("dataplane: too many listening sockets")

// ErrClosed is returned by [Backend.Apply] after [Backend.Shutdown].
var ErrClosed = errors.New("dataplane: closed")

// complete sets the defaults.
func (c Config) complete() Config {
	if c.Algorithm == nil {
		c.Algorithm = func(*ruleset.Port) Algorithm { return WeightedRoundRobin }
	}
	if c.Dial == nil {
		var d net.Dialer
		c.Dial = func(ctx context.Context, network string, to netip.AddrPort) (net.Conn, error) {
			return d.DialContext(ctx, network, to.String())
		}
	}
	if c.Serves == nil {
		c.Serves = func(*ruleset.Frontend, v1.Protocol, netip.AddrPort) bool { return true }
	}
	if c.Refused == nil {
		c.Refused = func(v1.Protocol, netip.AddrPort) {}
	}
	if c.Addresses == nil {
		c.Addresses = noAddresses{}
	}
	if c.Sockets == nil {
		c.Sockets = noLimit{}
	}
	c.DialTimeout = cmp.Or(c.DialTimeout, 5*time.Second)
	c.Drain = cmp.Or(c.Drain, 30*time.Second)
	c.UDPTimeout = cmp.Or(c.UDPTimeout, time.Minute)
	c.MaxConnections = cmp.Or(c.MaxConnections, 20000)
	c.MaxSessions = cmp.Or(c.MaxSessions, 5000)
	c.Log = backendconf.Log(c.Log)
	return c
}

// noLimit implements [Allowance] without a limit.
type noLimit struct{}

func (noLimit) Take() bool { return true }
func (noLimit) Give()      {}

// noAddresses implements [Addresses] for a node that already has all addresses.
type noAddresses struct{}

func (noAddresses) Own() ([]netip.Addr, error)  { return nil, nil }
func (noAddresses) Hold(netip.Addr) error       { return nil }
func (noAddresses) Release(netip.Addr) error    { return nil }
func (noAddresses) Held() ([]netip.Addr, error) { return nil, nil }
