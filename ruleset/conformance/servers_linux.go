package conformance

import (
	"context"
	"fmt"
	"io"
	"net"
	"net/netip"
	"testing"

	"github.com/go-proxier/proxier/internal/testing/netlab"
)

// Every server greets a new TCP connection or a datagram with a line of its own
// address and the client's address that it sees: "10.244.1.11:8080 192.0.2.10:40000".
// A TCP server then sends back everything it receives, until the connection is
// closed.

// serve starts the servers of all pods and of the node itself.
func (n *network) serve(s *scene) {
	s.tb.Helper()
	for _, f := range s.ipFamilies {
		for _, t := range s.config.elsewhere {
			serveTCP(s.tb, n.remote, t.at(f))
			serveUDP(s.tb, n.remote, t.at(f))
		}
		for _, p := range n.pods {
			for _, port := range []uint16{podPort, podPort2} {
				serveTCP(s.tb, p.ns, netip.AddrPortFrom(p.addr(f), port))
				serveUDP(s.tb, p.ns, netip.AddrPortFrom(p.addr(f), port))
			}
		}
		for _, a := range s.nodeAddresses(f) {
			serveTCP(s.tb, n.node, netip.AddrPortFrom(a, nodePortOwn))
			serveUDP(s.tb, n.node, netip.AddrPortFrom(a, nodePortOwn))
		}
	}
}

func greeting(self netip.AddrPort, peer net.Addr) []byte {
	return fmt.Appendf(nil, "%s %s\n", self, peer)
}

func serveTCP(tb testing.TB, ns *netlab.Host, at netip.AddrPort) {
	tb.Helper()
	ns.ServeTCP(tb, at.String(), func(c net.Conn) {
		defer context.AfterFunc(tb.Context(), func() { c.Close() })()
		if _, err := c.Write(greeting(at, c.RemoteAddr())); err == nil {
			io.Copy(c, c)
		}
	})
}

func serveUDP(tb testing.TB, ns *netlab.Host, at netip.AddrPort) {
	tb.Helper()
	c, err := ns.ListenPacket("udp", at.String())
	if err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(func() { c.Close() })
	go func() {
		buf := make([]byte, 100)
		for {
			_, from, err := c.ReadFrom(buf)
			if err != nil {
				return
			}
			// A client without a reply reports that itself.
			_, _ = c.WriteTo(greeting(at, from), from)
		}
	}()
}
