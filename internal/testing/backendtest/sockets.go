//go:build linux

package backendtest

import (
	"context"
	"errors"
	"net"
	"net/netip"
	"testing"
	"time"

	"github.com/go-proxier/proxier/internal/testing/netlab"
	"github.com/go-proxier/proxier/internal/testing/testtime"
	"golang.org/x/sys/unix"
)

// OwnServer gives a host the addresses of the node of [NewNode], and starts a UDP server of
// the node itself at port 30080 of every address. It returns the addresses.
func OwnServer(t *testing.T, h *netlab.Host) []netip.Addr {
	t.Helper()
	for _, a := range nodeAddrs {
		if err := h.AddAddr("lo", netip.PrefixFrom(a, a.BitLen())); err != nil {
			t.Fatal(err)
		}
	}
	h.ServeUDP(t, "[::]:30080", "own")
	return nodeAddrs
}

// NodeIsRefused sends from the node to NodePort 30080 at the addresses. Every packet of a
// UDP socket and a TCP connection must be refused, as those of a remote client are.
func NodeIsRefused(t *testing.T, h *netlab.Host, at ...netip.Addr) {
	t.Helper()
	for _, a := range at {
		to := netip.AddrPortFrom(a, 30080).String()
		if err := h.RefusedUDP(to, testtime.Timeout); err != nil {
			t.Error(err)
		}
		ctx, cancel := context.WithTimeout(context.Background(), testtime.Timeout)
		if c, err := h.Dial(ctx, "tcp", "", to); !errors.Is(err, unix.ECONNREFUSED) {
			t.Errorf("TCP to %s: %v, %v", to, c, err)
		}
		cancel()
	}
}

// RefusedSockets opens UDP sockets on the host to the addresses, which must refuse them.
// exchange sends by one of the sockets and returns the answer.
func RefusedSockets(t *testing.T, h *netlab.Host, at ...netip.AddrPort) (exchange func(i int) (string, error)) {
	t.Helper()
	conns := make([]net.Conn, len(at))
	exchange = func(i int) (string, error) {
		if err := conns[i].SetDeadline(time.Now().Add(testtime.Timeout)); err != nil {
			return "", err
		}
		if _, err := conns[i].Write([]byte("hello")); err != nil {
			return "", err
		}
		buf := make([]byte, 64)
		n, err := conns[i].Read(buf)
		return string(buf[:n]), err
	}
	for i, a := range at {
		var err error
		if conns[i], err = h.Dial(t.Context(), "udp", "", a.String()); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { conns[i].Close() })
		if got, err := exchange(i); !errors.Is(err, unix.ECONNREFUSED) {
			t.Fatalf("%s: %q, %v", a, got, err)
		}
	}
	return exchange
}
