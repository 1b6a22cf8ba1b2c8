package dataplane

import (
	"context"
	"errors"
	"log/slog"
	"net"
	"net/netip"
	"sync"
	"testing"
	"time"

	"github.com/go-proxier/proxier/examples/userspace/vip"
	"github.com/go-proxier/proxier/internal/testing/must"
	"github.com/go-proxier/proxier/internal/testing/netlab"
	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/ruleset/conformance"
)

func TestMain(m *testing.M) {
	netlab.Parallel(4) // worlds wait for packets that must not arrive
	conformance.Main(m)
}

// dialer opens connections from inside a world's node, in goroutines locked to threads in
// its namespace. A program that runs on the node needs no dialer.
type dialer struct{ requests chan func() }

func newDialer(tb testing.TB, env conformance.Env) *dialer {
	d := &dialer{make(chan func())}
	var wg sync.WaitGroup
	for range 8 {
		wg.Go(func() {
			if err := env.Do(func() error {
				for f := range d.requests {
					f()
				}
				return nil
			}); err != nil {
				tb.Error(err)
			}
		})
	}
	tb.Cleanup(func() {
		close(d.requests)
		wg.Wait()
	})
	return d
}

func (d *dialer) dial(ctx context.Context, network string, to netip.AddrPort) (conn net.Conn, err error) {
	done := make(chan struct{})
	d.requests <- func() {
		defer close(done)
		var nd net.Dialer
		conn, err = nd.DialContext(ctx, network, to.String())
	}
	<-done
	return conn, err
}

// inWorld returns a Backend for a world's node.
func inWorld(tb testing.TB, env conformance.Env, c Config) *Backend {
	tb.Helper()
	addresses := must.Get(vip.New())(tb)
	tb.Cleanup(func() { addresses.Close() })
	d := newDialer(tb, env)
	c.Addresses, c.Dial = addresses, d.dial
	c.Log = slog.New(slog.NewTextHandler(tb.Output(), &slog.HandlerOptions{Level: slog.LevelWarn}))
	b := New(c)
	tb.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), 10*time.Millisecond)
		defer cancel()
		if err := b.Shutdown(ctx); err != nil && !errors.Is(err, context.DeadlineExceeded) {
			tb.Error(err)
		}
	})
	return b
}

func TestConformance(t *testing.T) {
	t.Parallel()
	conformance.Run(t, conformance.Options{
		New: func(tb testing.TB, env conformance.Env) ruleset.Backend { return inWorld(tb, env, Config{}) },
		Skip: map[conformance.Feature]string{
			conformance.SCTP:               "it forwards TCP and UDP",
			conformance.SourceAddress:      "it makes connections of its own",
			conformance.OtherPorts:         "addresses of Services are the node's own",
			conformance.RefuseBySource:     "a socket answers a source or not, and without one all are refused",
			conformance.InterfaceDetection: "a connection does not show by which interface it came",
			conformance.ServiceCIDRs:       "it has only addresses that some Service has",
			conformance.Restart:            "connections and sockets end with the process",
		},
	})
}
