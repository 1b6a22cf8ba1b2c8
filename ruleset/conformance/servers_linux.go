package conformance

import (
	"fmt"
	"io"
	"net"
	"net/netip"
	"sync"
	"testing"

	"github.com/go-proxier/proxier/internal/netlab"
	"github.com/go-proxier/proxier/tracker"
)

// Every server greets a new TCP connection or a datagram with a line of its own
// address and the client's address that it sees: "10.244.1.11:8080 192.0.2.10:40000".
// A TCP server then sends back everything it receives, until the connection is
// closed.

// serve starts the servers of all pods and of the node itself.
func (n *network) serve(tb testing.TB, families []tracker.Family) {
	tb.Helper()
	for _, f := range families {
		for _, p := range n.pods {
			for _, port := range []uint16{podPort, podPort2} {
				serveTCP(tb, p.ns, netip.AddrPortFrom(p.addr(f), port))
				serveUDP(tb, p.ns, netip.AddrPortFrom(p.addr(f), port))
			}
		}
		for _, a := range n.nodeAddresses(f) {
			serveTCP(tb, n.node, netip.AddrPortFrom(a, nodePortOwn))
			serveUDP(tb, n.node, netip.AddrPortFrom(a, nodePortOwn))
		}
	}
}

func greeting(self netip.AddrPort, peer net.Addr) []byte {
	return fmt.Appendf(nil, "%s %s\n", self, peer)
}

func serveTCP(tb testing.TB, ns *netlab.Host, at netip.AddrPort) {
	tb.Helper()
	l, err := ns.Listen("tcp", at.String())
	if err != nil {
		tb.Fatal(err)
	}
	var (
		mu   sync.Mutex
		open = map[net.Conn]bool{}
		done bool
	)
	tb.Cleanup(func() {
		l.Close()
		mu.Lock()
		defer mu.Unlock()
		done = true
		for c := range open {
			c.Close()
		}
	})
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			mu.Lock()
			if done {
				c.Close()
				mu.Unlock()
				return
			}
			open[c] = true
			mu.Unlock()
			go func() {
				defer func() {
					c.Close()
					mu.Lock()
					delete(open, c)
					mu.Unlock()
				}()
				if _, err := c.Write(greeting(at, c.RemoteAddr())); err == nil {
					io.Copy(c, c)
				}
			}()
		}
	}()
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
