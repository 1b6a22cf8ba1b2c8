//go:build linux

package nftables

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	v1 "k8s.io/api/core/v1"

	"github.com/go-proxier/proxier/conntrack"
	"github.com/go-proxier/proxier/internal/netlab"
	"github.com/go-proxier/proxier/tracker"
)

// ownAddresses gives the host of a rig an address of each family and a UDP server of
// its own at port 30080 of every address. It returns the addresses.
func ownAddresses(t *testing.T, h *netlab.Host) []netip.Addr {
	t.Helper()
	own := []netip.Addr{netip.MustParseAddr("192.168.7.1"), netip.MustParseAddr("fd00:7::1")}
	for _, a := range own {
		if err := h.AddAddr("lo", netip.PrefixFrom(a, a.BitLen())); err != nil {
			t.Fatal(err)
		}
	}
	h.ServeUDP(t, "[::]:30080", "own")
	return own
}

func nodePort(s *v1.Service) {
	s.Spec.Type, s.Spec.Ports[0].NodePort = v1.ServiceTypeNodePort, 30080
}

// TestNodeIsRefused sends from the node to a NodePort without endpoints: every
// packet of a UDP socket is refused as a remote client's would be, and none reaches the
// node's own server at the port.
func TestNodeIsRefused(t *testing.T) {
	t.Parallel()
	r := newRig(t, netlab.NewHost(t))
	own := ownAddresses(t, r.host)
	r.tracker.SetService(svc(0, nodePort, overUDP))
	r.tracker.SetService(svc(1, nodePort))
	r.sync()
	for _, a := range own {
		to := netip.AddrPortFrom(a, 30080).String()
		if err := r.host.RefusedUDP(to, time.Minute); err != nil {
			t.Error(err)
		}
		ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
		if c, err := r.host.Dial(ctx, "tcp", "", to); !errors.Is(err, unix.ECONNREFUSED) {
			t.Errorf("TCP to %s: %v, %v", to, c, err)
		}
		cancel()
	}
}

// TestRefusedSocketIsForwardedLater has a socket on the node refused at a NodePort.
// As soon as the Service has an endpoint, the same socket reaches it.
func TestRefusedSocketIsForwardedLater(t *testing.T) {
	t.Parallel()
	r := newRig(t, netlab.NewHost(t))
	cleaner, err := conntrack.New(conntrack.Config{NetNS: r.host.File()})
	if err != nil {
		t.Fatal(err)
	}
	defer cleaner.Close()
	r.cursor.Detach()
	r.cursor = r.engine.Attach("nftables", conntrack.After(r.backend, cleaner))
	own := ownAddresses(t, r.host)
	r.tracker.SetService(svc(0, nodePort, overUDP))
	r.sync()
	conns := map[tracker.Family]net.Conn{}
	exchange := func(f tracker.Family) (string, error) {
		c := conns[f]
		c.SetDeadline(time.Now().Add(time.Minute))
		if _, err := c.Write([]byte("hello")); err != nil {
			return "", err
		}
		buf := make([]byte, 64)
		n, err := c.Read(buf)
		return string(buf[:n]), err
	}
	for _, a := range own {
		c, err := r.host.Dial(t.Context(), "udp", "", netip.AddrPortFrom(a, 30080).String())
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		f := tracker.FamilyOf(a)
		conns[f] = c
		if got, err := exchange(f); !errors.Is(err, unix.ECONNREFUSED) {
			t.Fatalf("%v: %q, %v", f, got, err)
		}
	}
	// The endpoint is another server on the node.
	for i, f := range []tracker.Family{tracker.IPv4, tracker.IPv6} {
		l, err := r.host.ListenPacket("udp", netip.AddrPortFrom(own[i], 8080).String())
		if err != nil {
			t.Fatal(err)
		}
		defer l.Close()
		go func() {
			buf := make([]byte, 64)
			for {
				_, from, err := l.ReadFrom(buf)
				if err != nil {
					return
				}
				_, _ = l.WriteTo(fmt.Append(nil, f), from)
			}
		}()
		es, proto := epSlice(0, f, 2), v1.ProtocolUDP
		es.Endpoints[0].Addresses[0], es.Ports[0].Protocol = own[i].String(), &proto
		r.tracker.SetSlice(es)
	}
	r.sync()
	for f := range conns {
		if got, err := exchange(f); got != fmt.Sprint(f) || err != nil {
			t.Errorf("%v: %q, %v", f, got, err)
		}
	}
}
