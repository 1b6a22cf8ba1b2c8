//go:build linux

package nftables

import (
	"context"
	"net"
	"net/netip"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	v1 "k8s.io/api/core/v1"

	"github.com/go-proxier/proxier/tracker"
)

// TestPriorityOfAProcessIsKept sends packets with a priority of their own that
// looks like a ticket: only a connection's first may lose it.
func TestPriorityOfAProcessIsKept(t *testing.T) {
	t.Parallel()
	r := newRig(t, newHost(t))
	needNFT(t, r.host)
	const server = "192.168.7.1"
	must := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	must(r.host.AddAddr("lo", netip.MustParsePrefix(server+"/32")))
	must(r.host.AddRoute(netip.MustParsePrefix("0.0.0.0/0"), netip.Addr{}, "lo"))
	r.tracker.SetService(svc(0, func(s *v1.Service) { s.Spec.Ports[0].Protocol = v1.ProtocolUDP }))
	slice, proto := epSlice(0, tracker.IPv4, 2), v1.ProtocolUDP
	slice.Endpoints[0].Addresses[0], slice.Ports[0].Protocol = server, &proto
	r.tracker.SetSlice(slice)
	r.sync()
	r.nft(`add table ip spy
add chain ip spy out { type filter hook output priority 10; }
add rule ip spy out udp dport 8080 counter
add rule ip spy out udp dport 8080 meta priority 8000:1234 counter`)

	l, err := r.host.ListenPacket("udp", server+":8080")
	must(err)
	defer l.Close()
	c, err := r.host.Dial(context.Background(), "udp", "", "10.96.0.1:80")
	must(err)
	defer c.Close()
	raw, err := c.(*net.UDPConn).SyscallConn()
	must(err)
	priority := uint32(0x80001234)
	must(raw.Control(func(fd uintptr) {
		err = unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_PRIORITY, int(int32(priority)))
	}))
	must(err)
	buf := make([]byte, 16)
	for range 5 { // each with an answer, so that the connection is established
		_, err := c.Write([]byte("hello"))
		must(err)
		l.SetReadDeadline(time.Now().Add(10 * time.Second))
		_, from, err := l.ReadFrom(buf)
		must(err)
		_, err = l.WriteTo(buf[:1], from)
		must(err)
		c.SetReadDeadline(time.Now().Add(10 * time.Second))
		_, err = c.Read(buf)
		must(err)
	}
	out := r.nft("list chain ip spy out")
	if !strings.Contains(out, "dport 8080 counter packets 5 ") || !strings.Contains(out, "8000:1234 counter packets 4 ") {
		t.Errorf("of 5 packets 4 should have their priority:\n%s", out)
	}
}
