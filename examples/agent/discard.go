package agent

import (
	"context"
	"net"
	"time"

	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/ruleset/dataplane"
	"github.com/go-proxier/proxier/tracker"
)

// Discard is an Options.Backend that accepts everything and programs nothing: a hollow proxy, for
// clusters with many simulated nodes. See also [ListenNowhere].
func Discard(context.Context, []tracker.Family) (ruleset.Backend, error) {
	return ruleset.BackendFunc(func(context.Context, *ruleset.Delta) error { return nil }), nil
}

// ListenNowhere is an Options.Listen that opens nothing: no client reaches its listeners. Many hollow
// nodes in one network namespace need it for Services with a health-check node port.
func ListenNowhere(_ context.Context, network, address string) (net.Listener, error) {
	addr, err := net.ResolveTCPAddr(network, address)
	if err != nil {
		return nil, err
	}
	closed, closeIt := context.WithCancel(context.Background())
	return nowhere{addr, closed, closeIt}, nil
}

// nowhere is a listener without clients.
type nowhere struct {
	addr    net.Addr
	closed  context.Context
	closeIt func()
}

func (n nowhere) Addr() net.Addr { return n.addr }

func (n nowhere) Close() error {
	n.closeIt()
	return nil
}

func (n nowhere) Accept() (net.Conn, error) {
	<-n.closed.Done()
	return nil, net.ErrClosed
}

// plain is a dataplane.Backend that others cannot alter.
type plain struct{ ruleset.Backend }

func (p plain) Limits(f tracker.Family) ruleset.Limits {
	return ruleset.LimitsOf(p.Backend, f)
}

func (plain) Traffic(context.Context) (*dataplane.Traffic, error) { return &dataplane.Traffic{}, nil }
func (plain) Check(context.Context) error                         { return nil }
func (plain) Close() error                                        { return nil }

func (plain) Watch(ctx context.Context, _ time.Duration, _ func(error)) error {
	<-ctx.Done()
	return ctx.Err()
}
