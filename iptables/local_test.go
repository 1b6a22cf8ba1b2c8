//go:build linux

package iptables

import (
	"context"
	"errors"
	"net"
	"net/netip"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	v1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"

	"github.com/go-proxier/proxier/conntrack"
	"github.com/go-proxier/proxier/internal/testtime"
	"github.com/go-proxier/proxier/tracker"
)

// TestNodeIsRefused sends from the node to a NodePort without endpoints: every
// packet of a UDP socket is refused as a remote client's would be, and none reaches the
// node's own server at the port. So it is at the loopback address if NodePorts answer
// there; if not, the address is left alone.
func TestNodeIsRefused(t *testing.T) {
	flavours(t, func(t *testing.T, flavour Flavour) {
		t.Parallel()
		for _, localhost := range []bool{true, false} {
			r := newRig(t, flavour, func(c *Config) { c.LocalhostNodePorts = localhost })
			own := []string{"192.168.7.1", "fd00:7::1"}
			for _, a := range own {
				a := netip.MustParseAddr(a)
				if err := r.host.AddAddr("lo", netip.PrefixFrom(a, a.BitLen())); err != nil {
					t.Fatal(err)
				}
			}
			r.host.ServeUDP(t, "[::]:30080", "own")
			r.tracker.SetService(svc(0, nodePort(30080), overUDP))
			r.tracker.SetService(svc(1, nodePort(30080)))
			r.sync()
			if localhost {
				own = append(own, "127.0.0.1", "127.0.0.2")
			} else if err := r.host.RefusedUDP("127.0.0.1:30080", testtime.Timeout); err == nil {
				t.Error("127.0.0.1 is refused, though NodePorts do not answer there")
			}
			for _, a := range own {
				to := netip.AddrPortFrom(netip.MustParseAddr(a), 30080).String()
				if err := r.host.RefusedUDP(to, testtime.Timeout); err != nil {
					t.Errorf("localhost %v: %v", localhost, err)
				}
				ctx, cancel := context.WithTimeout(context.Background(), testtime.Timeout)
				if c, err := r.host.Dial(ctx, "tcp", "", to); !errors.Is(err, unix.ECONNREFUSED) {
					t.Errorf("localhost %v: TCP to %s: %v, %v", localhost, to, c, err)
				}
				cancel()
			}
		}
	})
}

// TestRefusedSocketIsForwardedLater has a socket refused at a NodePort, at an address
// of the node and at the loopback address. As soon as the Service has an endpoint, the
// same socket reaches it.
func TestRefusedSocketIsForwardedLater(t *testing.T) {
	flavours(t, func(t *testing.T, flavour Flavour) {
		t.Parallel()
		r := newRig(t, flavour, func(c *Config) { c.LocalhostNodePorts = true })
		cleaner, err := conntrack.New(conntrack.Config{NetNS: r.host.File()})
		if err != nil {
			t.Fatal(err)
		}
		defer cleaner.Close()
		r.cursor.Detach()
		r.cursor = r.engine.Attach("iptables", conntrack.After(r.backend, cleaner))
		a := netip.MustParseAddr("192.168.7.1")
		if err := r.host.AddAddr("lo", netip.PrefixFrom(a, 32)); err != nil {
			t.Fatal(err)
		}
		r.tracker.SetService(svc(0, nodePort(30080), overUDP))
		r.sync()
		exchange := func(c net.Conn) (string, error) {
			c.SetDeadline(time.Now().Add(testtime.Timeout))
			if _, err := c.Write([]byte("hello")); err != nil {
				return "", err
			}
			buf := make([]byte, 64)
			n, err := c.Read(buf)
			return string(buf[:n]), err
		}
		var conns []net.Conn
		for _, to := range []string{"192.168.7.1:30080", "127.0.0.1:30080"} {
			c, err := r.host.Dial(t.Context(), "udp", "", to)
			if err != nil {
				t.Fatal(err)
			}
			defer c.Close()
			conns = append(conns, c)
			if got, err := exchange(c); !errors.Is(err, unix.ECONNREFUSED) {
				t.Fatalf("%s: %q, %v", to, got, err)
			}
		}
		r.host.ServeUDP(t, "192.168.7.1:8080", "endpoint")
		es, proto := slice(0, tracker.IPv4), v1.ProtocolUDP
		es.Endpoints, es.Ports[0].Protocol = []discovery.Endpoint{{Addresses: []string{a.String()}}}, &proto
		r.tracker.SetSlice(es)
		r.sync()
		for _, c := range conns {
			if got, err := exchange(c); got != "endpoint" || err != nil {
				t.Errorf("%s: %q, %v", c.RemoteAddr(), got, err)
			}
		}
	})
}
