package dataplane

import (
	"context"
	"net"
	"net/netip"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	v1 "k8s.io/api/core/v1"

	"github.com/go-proxier/proxier/internal/testing/must"
	"github.com/go-proxier/proxier/internal/testing/testtime"
)

// TestEndpointsThatLeadBackAreNotDialed has Services whose endpoints are frontends of this process: their
// own, each other's, and one at which another program listened until a moment ago.
func TestEndpointsThatLeadBackAreNotDialed(t *testing.T) {
	t.Parallel()
	for _, proto := range []v1.Protocol{v1.ProtocolTCP, v1.ProtocolUDP} {
		t.Run(string(proto), func(t *testing.T) {
			t.Parallel()
			network := strings.ToLower(string(proto))
			var dials atomic.Int32
			refused := make(chan netip.AddrPort, 100)
			w, log := logging(t, Config{
				Refused: func(_ v1.Protocol, at netip.AddrPort) { refused <- at },
				Dial: func(ctx context.Context, network string, to netip.AddrPort) (net.Conn, error) {
					dials.Add(1)
					return (&net.Dialer{}).DialContext(ctx, network, to.String())
				},
			})
			at := func(port uint16) netip.AddrPort { return netip.AddrPortFrom(localhost, port) }
			send := func(c net.Conn, port uint16) net.Conn {
				t.Helper()
				if c == nil {
					var err error
					if c, err = net.Dial(network, at(port).String()); err != nil {
						return nil // it was reset
					}
					t.Cleanup(func() { c.Close() })
				}
				if _, err := c.Write([]byte("hello")); err != nil {
					t.Logf("write: %v", err) // it was reset
				}
				return c
			}
			wantRefused := func(what string, port uint16) {
				t.Helper()
				select {
				case got := <-refused:
					if got != at(port) {
						t.Errorf("%s: %v refused", what, got)
					}
				case <-time.After(testtime.Timeout):
					t.Errorf("%s: nothing was refused", what)
				}
			}
			own, first, second := freePort(t, network), freePort(t, network), freePort(t, network)
			for name, s := range map[string]struct{ port, endpoint uint16 }{"own": {own, own}, "first": {first, second}, "second": {second, first}} {
				w.service(name, proto, s.port)
				w.endpoints(name, proto, at(s.endpoint))
			}
			w.sync()
			send(nil, own)
			wantRefused("own frontend", own)
			send(nil, first)
			wantRefused("each other's frontend", first)
			if n := dials.Load(); n != 0 {
				t.Errorf("%d dials", n)
			}
			if !strings.Contains(log.String(), "endpoint is not used") {
				t.Errorf("log: %q", log.String())
			}

			if proto == v1.ProtocolTCP {
				return
			}
			// The process takes the place of an endpoint to which a client has a session.
			endpoint, stop := serveUDP(t, "other program", nil)
			w.endpoints("own", proto, endpoint)
			w.sync()
			client := send(nil, own)
			must.Get(hear(client))(t)
			stop()
			w.service("late", proto, endpoint.Port())
			w.endpoints("late", proto, at(own))
			w.sync()
			before := dials.Load()
			send(client, own)
			wantRefused("a frontend that was another program's", own)
			if n := dials.Load(); n != before {
				t.Errorf("%d dials of the new frontend", n-before)
			}
		})
	}
}
