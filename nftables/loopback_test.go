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

	"github.com/go-proxier/proxier/internal/testing/must"
	"github.com/go-proxier/proxier/internal/testing/netlab"
	"github.com/go-proxier/proxier/tracker"
)

// loopbackRig returns a rig with Service 0 at UDP port 80 of 10.96.0.1, with the edits made. Its
// one endpoint is a server on the node itself. client is a client of the Service.
func loopbackRig(t *testing.T, edits ...func(*v1.Service)) (r *rig, client *net.UDPConn, exchange func()) {
	t.Helper()
	r = newRig(t, netlab.NewHost(t))
	netlab.NeedPrograms(t, "nft")
	const server = "192.168.7.1"
	must.Do(t, r.host.AddAddr("lo", netip.MustParsePrefix(server+"/32")))
	must.Do(t, r.host.AddRoute(netip.MustParsePrefix("0.0.0.0/0"), netip.Addr{}, "lo"))
	r.tracker.SetService(svc(0, append(edits, overUDP)...))
	slice, proto := epSlice(0, tracker.IPv4, 2), v1.ProtocolUDP
	slice.Endpoints[0].Addresses[0], slice.Ports[0].Protocol = server, &proto
	r.tracker.SetSlice(slice)
	r.sync()
	l := must.Get(r.host.ListenPacket("udp", server+":8080"))(t)
	t.Cleanup(func() { l.Close() })
	c := must.Get(r.host.Dial(context.Background(), "udp", "", "10.96.0.1:80"))(t)
	t.Cleanup(func() { c.Close() })
	buf := make([]byte, 16)
	return r, c.(*net.UDPConn), func() {
		t.Helper()
		must.Get(c.Write([]byte("hello")))(t)
		l.SetReadDeadline(time.Now().Add(time.Minute))
		_, from, err := l.ReadFrom(buf)
		must.Do(t, err)
		must.Get(l.WriteTo(buf[:1], from))(t)
		c.SetReadDeadline(time.Now().Add(time.Minute))
		must.Get(c.Read(buf))(t)
	}
}

// TestPriorityOfAProcessIsKept sends packets with a priority that looks like a dispatch key. Only
// a connection's first packet may lose it.
func TestPriorityOfAProcessIsKept(t *testing.T) {
	t.Parallel()
	r, client, exchange := loopbackRig(t)
	r.nft(`add table ip spy
add chain ip spy out { type filter hook output priority 10; }
add rule ip spy out udp dport 8080 counter
add rule ip spy out udp dport 8080 meta priority 8000:1234 counter`)
	raw := must.Get(client.SyscallConn())(t)
	priority := uint32(0x80001234)
	must.Do(t, raw.Control(func(fd uintptr) {
		must.Do(t, unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_PRIORITY, int(int32(priority))))
	}))
	for range 5 { // each with an answer, so that the connection is established
		exchange()
	}
	out := r.nft("list chain ip spy out")
	if !strings.Contains(out, "dport 8080 counter packets 5 ") || !strings.Contains(out, "8000:1234 counter packets 4 ") {
		t.Errorf("of 5 packets 4 should have their priority:\n%s", out)
	}
}

// TestShorterAffinityTimeoutApplies shortens the affinity timeout of a Service. The new timeout
// applies to a remembered client when it connects again.
func TestShorterAffinityTimeoutApplies(t *testing.T) {
	t.Parallel()
	r, _, exchange := loopbackRig(t, sticky(3600))
	clients := func() string { return r.nft("list map ip proxier sticky-clients") }
	exchange()
	if out := clients(); !strings.Contains(out, "timeout 1h expires ") {
		t.Errorf("clients are %s", out)
	}
	r.tracker.SetService(svc(0, sticky(100), overUDP))
	r.sync()
	r.verify()
	if out := clients(); strings.Contains(out, "expires 1m") {
		t.Errorf("clients are %s", out)
	}
	again := must.Get(r.host.Dial(context.Background(), "udp", "", "10.96.0.1:80"))(t)
	defer again.Close()
	must.Get(again.Write([]byte("hello")))(t)
	if out := clients(); !strings.Contains(out, "expires 1m") {
		t.Errorf("clients are %s", out)
	}
}
