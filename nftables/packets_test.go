//go:build linux

package nftables

import (
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"regexp"
	"runtime"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	v1 "k8s.io/api/core/v1"

	"github.com/go-proxier/proxier/internal/testing/backendtest"
	"github.com/go-proxier/proxier/internal/testing/netlab"
	"github.com/go-proxier/proxier/internal/testing/testtime"
	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/ruleset/conformance"
	"github.com/go-proxier/proxier/ruleset/dataplane"
	"github.com/go-proxier/proxier/tracker"
)

// TestConformanceWithPacketCounters sends packets through every world, in which each Service with
// connections must have packets and bytes, and no other.
func TestConformanceWithPacketCounters(t *testing.T) {
	t.Parallel()
	testtime.NeedThorough(t)
	conformance.Run(t, conformance.Options{Skip: skips(), New: func(tb testing.TB, env conformance.Env) ruleset.Backend {
		b, err := New(tb.Context(), Config{NetNS: env.NetNS, Families: env.Families, CountPackets: true})
		if err != nil {
			tb.Fatal(err)
		}
		tb.Cleanup(func() { b.Close() })
		return b
	}})
}

// judge counts the packets of connections to port 8080 of a host, by rules of its own.
func (f *forwarder) judge(h *netlab.Host) {
	f.Helper()
	out, err := h.Run(f, "nft", "add table inet judge; add chain inet judge in { type filter hook input priority 0; }; add chain inet judge out { type filter hook output priority 0; }; "+
		"add rule inet judge in tcp dport 8080 counter; add rule inet judge out tcp sport 8080 counter")
	if err != nil {
		f.Fatalf("%v: %s", err, out)
	}
}

var judged = regexp.MustCompile(`counter packets (\d+) bytes (\d+)`)

// judged returns what the judges of the hosts counted.
func (f *forwarder) judged(hosts ...*netlab.Host) (packets, bytes uint64) {
	f.Helper()
	for _, h := range hosts {
		out, err := h.Run(f, "nft", "list table inet judge")
		if err != nil {
			f.Fatalf("%v: %s", err, out)
		}
		for _, m := range judged.FindAllStringSubmatch(out, -1) {
			p, _ := strconv.ParseUint(m[1], 10, 64)
			b, _ := strconv.ParseUint(m[2], 10, 64)
			packets, bytes = packets+p, bytes+b
		}
	}
	return packets, bytes
}

// exchange sends bytes to an echo server and reads them again.
func (f *forwarder) exchange(from *netlab.Host, to netip.AddrPort, bytes int) {
	f.Helper()
	c := f.dial(from, to)
	c.SetDeadline(time.Now().Add(testtime.Timeout))
	sent := make(chan error, 1)
	go func() {
		_, err := c.Write(make([]byte, bytes))
		sent <- err
	}()
	if _, err := io.CopyN(io.Discard, c, int64(bytes)); err != nil {
		f.Fatal(err)
	}
	f.must(<-sent, c.Close())
}

// TestPacketsOfServicesAreCounted compares the counters with those of the endpoints' hosts: for
// connections that cross the node, begin on it and end on it, in both families.
func TestPacketsOfServicesAreCounted(t *testing.T) {
	t.Parallel()
	netlab.Require(t)
	f := newForwarder(t, nil)
	needNFT(t, f.host)
	if n := strings.Count(f.nft("list tables"), "packets"); n != 0 {
		t.Errorf("%d tables without the option", n)
	}
	if got := traffic(t, f.backend); got.Known.Has(dataplane.CountsPackets) {
		t.Errorf("counters %b without the option", got.Known)
	}
	f.countPackets = true
	f.start()
	f.sync()
	f.judge(f.pods[0])
	f.judge(f.host)
	agree := func(what string) {
		t.Helper()
		var got dataplane.Counters
		var packets, bytes uint64
		defer func() {
			if t.Failed() {
				t.Logf("%s: counted %d packets and %d bytes of %d and %d\n%s", what, got.Packets, got.Bytes, packets, bytes, f.nft("list ruleset"))
			}
		}()
		f.eventually(what+": counters agree", func() bool { // connections may still end
			packets, bytes = f.judged(f.pods[0], f.host)
			got = total(traffic(t, f.backend))
			return got.Packets == packets && got.Bytes == bytes && packets != 0
		})
	}
	for _, fam := range families {
		for _, from := range []*netlab.Host{f.client, f.host} {
			for _, to := range []netip.AddrPort{
				clusterIP(fam, 80),
				netip.AddrPortFrom(nodeAddr[fam].Addr(), offloadNodePort),
				netip.AddrPortFrom(netip.MustParseAddr(externalIPs[index(fam)]), 80),
			} {
				f.exchange(from, to, 100_000)
				agree(fmt.Sprintf("%s to %s", from.Name, to))
			}
		}
	}
	// A connection that uses no Service is not counted. The last one before it may still end.
	before := total(traffic(t, f.backend))
	f.exchange(f.client, netip.AddrPortFrom(podAddr(tracker.IPv4, 1), 8080), 100_000)
	if after := total(traffic(t, f.backend)); after.Connections != before.Connections || after.Bytes-before.Bytes >= 100_000 {
		t.Errorf("a direct connection counted: %+v, before %+v", after, before)
	}
	// The endpoint is on the node itself.
	for _, fam := range families {
		f.host.ServeTCP(t, netip.AddrPortFrom(nodeAddr[fam].Addr(), 8080).String(), func(c net.Conn) { io.Copy(c, c) })
		es := epSlice(0, fam, 1)
		es.Endpoints[0].Addresses[0] = nodeAddr[fam].Addr().String()
		f.tracker.SetSlice(es)
		f.sync()
		for _, from := range []*netlab.Host{f.client, f.host} {
			f.exchange(from, clusterIP(fam, 80), 100_000)
			agree(fmt.Sprintf("%s to a server on the node, %s", from.Name, fam))
		}
	}
	f.endpoints(1)
	// Counters stay.
	for range 2 {
		f.cursor.Resync()
		f.sync()
		agree("a full delta")
		f.start()
		f.sync()
		agree("a restart")
		f.limit = smallLimit / 2 // tables are swapped
	}
	f.exchange(f.client, clusterIP(tracker.IPv4, 80), 1000)
	agree("after all")
	// A lost frontend loses its counter.
	// The last packets of a connection that ends may add it again.
	f.eventually("the counter of a deleted Service is deleted", func() bool {
		f.service()
		f.sync()
		f.tracker.DeleteService(backendtest.ServiceName(0))
		f.sync()
		return !strings.Contains(f.nft("list set ip proxier-packets packets"), "10.96.0.1 ")
	})
	// Alterations are noticed and repaired.
	for _, script := range []string{
		"delete table ip6 proxier-packets", "flush chain ip proxier-packets count-input",
		"add rule ip proxier-packets count-postrouting counter", "add chain ip proxier-packets more",
	} {
		f.nft(script)
		var drift *dataplane.DriftError
		if err := f.backend.Check(t.Context()); !errors.As(err, &drift) {
			t.Errorf("%s: %v, want a DriftError", script, err)
		}
		f.cursor.Resync()
		f.sync()
		f.must(f.backend.Check(t.Context()))
	}
	listing := f.nft("list table ip proxier-packets")
	for _, want := range []string{
		"type filter hook input priority filter; policy accept;", "type filter hook postrouting priority filter; policy accept;",
		`iifname != "lo" ct status dnat jump count`, "ct protocol tcp update @packets { ct original ip daddr . ct protocol . ct original proto-dst counter }",
	} {
		if !strings.Contains(listing, want) {
			t.Errorf("no %q in\n%s", want, listing)
		}
	}
	// Without the option, and after Cleanup, no table is left.
	f.countPackets = false
	f.start()
	f.sync()
	if out := f.nft("list tables"); strings.Contains(out, "packets") {
		t.Errorf("without the option: %s", out)
	}
	f.countPackets = true
	f.start()
	f.sync()
	f.must(Cleanup(t.Context(), f.backend.config))
	if out := f.nft("list tables"); strings.Contains(out, "proxier") {
		t.Errorf("after Cleanup: %s", out)
	}
}

// BenchmarkPacketCounters sends datagrams across a node: on a node without rules, to a Service, and to a
// Service with Config.CountPackets, in turns of 1,000. The time is that of the sender's
// thread, on which the kernel forwards the datagrams, too.
func BenchmarkPacketCounters(b *testing.B) {
	const turn = 1000
	type way struct {
		name string
		conn net.Conn
		took time.Duration
	}
	var ways []*way
	for _, name := range []string{"direct", "service", "counted"} {
		f := newForwarder(b, nil)
		f.countPackets = name == "counted"
		f.start()
		f.tracker.SetService(svc(0, func(s *v1.Service) { s.Spec.Ports[0].Protocol = v1.ProtocolUDP }))
		es := epSlice(0, tracker.IPv4, 1)
		udp := v1.ProtocolUDP
		es.Ports[0].Protocol = &udp
		f.tracker.SetSlice(es)
		f.sync()
		to := clusterIP(tracker.IPv4, 80)
		if name == "direct" {
			f.must(Cleanup(b.Context(), Config{NetNS: f.host.File()}))
			to = netip.AddrPortFrom(podAddr(tracker.IPv4, 0), 8080)
		}
		// The pod has a socket, so that it sends no ICMP errors.
		p, err := f.pods[0].ListenPacket("udp", netip.AddrPortFrom(podAddr(tracker.IPv4, 0), 8080).String())
		f.must(err)
		b.Cleanup(func() { p.Close() })
		c, err := f.client.Dial(b.Context(), "udp", "", to.String())
		f.must(err)
		b.Cleanup(func() { c.Close() })
		ways = append(ways, &way{name: name, conn: c})
	}
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	data := make([]byte, 100)
	for b.Loop() {
		for _, w := range ways {
			began := threadTime(b)
			for range turn {
				if _, err := w.conn.Write(data); err != nil {
					b.Fatal(err)
				}
			}
			w.took += threadTime(b) - began
		}
	}
	for _, w := range ways {
		b.ReportMetric(float64(w.took.Nanoseconds())/float64(turn*b.N), w.name+"-ns/packet")
	}
	b.ReportMetric(0, "ns/op")
}

// threadTime returns the CPU time of the calling thread.
func threadTime(b *testing.B) time.Duration {
	var u unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_THREAD_CPUTIME_ID, &u); err != nil {
		b.Fatal(err)
	}
	return time.Duration(u.Nano())
}
