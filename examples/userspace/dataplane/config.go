package dataplane

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"time"

	"github.com/go-proxier/proxier/examples/userspace/balance"
	"github.com/go-proxier/proxier/ruleset"
)

// Config is what a [Backend] is made of. The zero value listens at addresses that
// are there already.
type Config struct {
	// Addresses makes the addresses of Services the node's own, and knows which the
	// node has besides. Nil: all addresses that Services have are the node's already,
	// and it has none for NodePorts.
	Addresses Addresses
	// Algorithm chooses how the endpoints of a Service without a hash
	// ([ruleset.Service.Hash]) are chosen. Nil: weighted round robin for all.
	Algorithm func(*ruleset.Service) balance.Algorithm
	// Dial opens connections to endpoints; network is "tcp" or "udp". Nil: package
	// net. A TCP connection should be a *net.TCPConn.
	Dial func(ctx context.Context, network string, to netip.AddrPort) (net.Conn, error)
	// DialTimeout is how long one endpoint may take to answer. 0 means 5 s.
	DialTimeout time.Duration
	// Attempts is how many endpoints are tried for one connection. 0 means 3.
	Attempts int
	// Drain is how long the connections of an endpoint that is gone may go on. 0
	// means 30 s, a negative one that they are cut at once.
	Drain time.Duration
	// UDPTimeout is how long a UDP session lasts after its last datagram in either
	// direction. 0 means 60 s.
	UDPTimeout time.Duration
	// MaxConnections is how many TCP connections there may be at a time, and
	// MaxServiceConnections how many of one Service port. Others are reset. 0 means
	// 20,000 and no limit of its own. Each takes two file descriptors, and four more
	// while it is busy on Linux.
	MaxConnections, MaxServiceConnections int
	// MaxSessions is how many UDP sessions there may be at a time, each with a file
	// descriptor. One more ends the one that was not used for longest. 0 means 5,000.
	MaxSessions int
	// Log is told of what cannot be served. Nil discards.
	Log *slog.Logger
}

// Addresses makes addresses the node's own. It is used by one goroutine at a time.
type Addresses interface {
	// Own returns the addresses of the node's interfaces, of both families.
	Own() ([]netip.Addr, error)
	// Hold makes an address the node's own. To hold one again, or one that is in
	// Own, does nothing and is no error.
	Hold(netip.Addr) error
	// Release takes back a Hold. To release what is not held is no error.
	Release(netip.Addr) error
	// Held returns what is held, also by an earlier process.
	Held() ([]netip.Addr, error)
}

// ErrConfig is what errors of [New] are.
var ErrConfig = errors.New("dataplane: bad configuration")

// ErrClosed is returned by [Backend.Apply] after [Backend.Shutdown].
var ErrClosed = errors.New("dataplane: closed")

// complete checks c and fills in its defaults.
func (c Config) complete() (Config, error) {
	for _, x := range []struct {
		name  string
		value int64
	}{
		{"DialTimeout", int64(c.DialTimeout)}, {"Attempts", int64(c.Attempts)}, {"UDPTimeout", int64(c.UDPTimeout)},
		{"MaxConnections", int64(c.MaxConnections)}, {"MaxServiceConnections", int64(c.MaxServiceConnections)},
		{"MaxSessions", int64(c.MaxSessions)},
	} {
		if x.value < 0 {
			return c, fmt.Errorf("%w: %s is negative", ErrConfig, x.name)
		}
	}
	if c.Algorithm == nil {
		c.Algorithm = func(*ruleset.Service) balance.Algorithm { return balance.WeightedRoundRobinAlgorithm }
	}
	if c.Dial == nil {
		var d net.Dialer
		c.Dial = func(ctx context.Context, network string, to netip.AddrPort) (net.Conn, error) {
			return d.DialContext(ctx, network, to.String())
		}
	}
	if c.Addresses == nil {
		c.Addresses = noAddresses{}
	}
	setDefault(&c.DialTimeout, 5*time.Second)
	setDefault(&c.Attempts, 3)
	setDefault(&c.Drain, 30*time.Second)
	setDefault(&c.UDPTimeout, time.Minute)
	setDefault(&c.MaxConnections, 20000)
	setDefault(&c.MaxSessions, 5000)
	if c.Log == nil {
		c.Log = slog.New(slog.DiscardHandler)
	}
	return c, nil
}

func setDefault[T comparable](field *T, value T) {
	var zero T
	if *field == zero {
		*field = value
	}
}

// noAddresses is [Addresses] where nothing has to be done.
type noAddresses struct{}

func (noAddresses) Own() ([]netip.Addr, error)  { return nil, nil }
func (noAddresses) Hold(netip.Addr) error       { return nil }
func (noAddresses) Release(netip.Addr) error    { return nil }
func (noAddresses) Held() ([]netip.Addr, error) { return nil, nil }
