package conformance

import (
	"context"
	"net"
	"net/netip"
	"testing"

	"github.com/go-proxier/proxier/internal/testing/netlab"
)

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

func serveTCP(tb testing.TB, ns *netlab.Host, at netip.AddrPort) {
	tb.Helper()
	ns.ServeTCP(tb, at.String(), func(c net.Conn) {
		defer context.AfterFunc(tb.Context(), func() { c.Close() })()
		netlab.Greet(c)
	})
}

func serveUDP(tb testing.TB, ns *netlab.Host, at netip.AddrPort) {
	tb.Helper()
	c, err := ns.ListenPacket("udp", at.String())
	if err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(func() { c.Close() })
	go netlab.ServePackets(c, func(from netip.AddrPort) []byte { return netlab.Greeting(at, from) })
}
