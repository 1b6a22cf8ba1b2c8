//go:build linux

package ipvs

import (
	"context"
	"encoding/binary"
	"fmt"
	"net"
	"net/netip"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"github.com/go-proxier/proxier/internal/inet"
	"github.com/go-proxier/proxier/internal/testing/backendtest"
	"github.com/go-proxier/proxier/internal/testing/must"
	"github.com/go-proxier/proxier/internal/testing/netlab"
	"github.com/go-proxier/proxier/internal/testing/vm"
	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/tracker"
)

// BenchmarkKernel measures the backend against a floor of bare netlink requests in the same
// run. The metric x-floor is the ratio of the two times; in a virtual machine the times
// themselves mean nothing.
//
//	go test -run '^$' -bench Kernel -benchtime 1x ./ipvs
func BenchmarkKernel(b *testing.B) {
	if !vm.Inside(b, vm.IPVS) {
		return
	}
	for _, services := range []int{1000, 10000} {
		name := fmt.Sprintf("services=%d/endpoints=10", services)
		b.Run("ColdStart/"+name, func(b *testing.B) { benchColdStart(b, services) })
		b.Run("OneEndpoint/"+name, func(b *testing.B) { benchOneEndpoint(b, services) })
	}
	for _, services := range []int{10, 10000} {
		b.Run(fmt.Sprintf("Connections/services=%d", services), func(b *testing.B) { benchConnections(b, services) })
	}
}

// BenchmarkChangeBesideAttacker: see [backendtest.ChangeBesideAttacker]. In a virtual machine, compare
// its lines with the one without an attack.
func BenchmarkChangeBesideAttacker(b *testing.B) {
	if !vm.Inside(b, vm.IPVS) {
		return
	}
	backendtest.ChangeBesideAttacker(b, func(tb testing.TB) ruleset.Backend {
		backend := must.Get(New(tb.Context(), Config{NetNS: newHost(tb).File(), Families: []tracker.Family{tracker.IPv4}}))(tb)
		tb.Cleanup(func() { backend.Close() })
		return backend
	})
}

// fill sets Services with ten endpoints each.
func (r *rig) fill(services int) {
	for i := range services {
		var eps [10]int
		for n := range eps {
			eps[n] = -(i*10 + n + 1)
		}
		r.set(svc(i), i, eps[:]...)
	}
}

func benchColdStart(b *testing.B, services int) {
	config := Config{Families: []tracker.Family{tracker.IPv4}}
	var floor, took time.Duration
	for b.Loop() {
		b.StopTimer()
		bare := newBare(b, newHost(b))
		start := time.Now()
		for i := range services {
			vip := netip.MustParseAddr(clusterIP(i))
			bare.call(bare.service(vip))
			for n := range 10 {
				bare.call(bare.destination(vip, i*10+n+1))
			}
		}
		floor += time.Since(start)
		r := newRig(b, newHost(b), config)
		r.fill(services)
		b.StartTimer()
		start = time.Now()
		r.sync()
		took += time.Since(start)
		if got := len(r.backend.states[0].virtuals); got != services {
			b.Fatalf("%d virtual servers", got)
		}
	}
	b.ReportMetric(float64(took)/float64(floor), "x-floor")
}

func benchOneEndpoint(b *testing.B, services int) {
	r := newRig(b, newHost(b), Config{Families: []tracker.Family{tracker.IPv4}})
	r.fill(services)
	r.sync()
	bare := newBare(b, newHost(b))
	vip := netip.MustParseAddr(clusterIP(1))
	bare.call(bare.service(vip))
	const times = 300
	start := time.Now()
	for n := range times {
		bare.call(bare.destination(vip, n+1))
	}
	floor := time.Since(start) / times
	eps := []int{-11, -12, -13, -14, -15, -16, -17, -18, -19}
	calls, n := r.calls(), 0
	// A backend that does nothing gives the share of the tracker and ruleset.
	idle := r.engine.Attach("idle", ruleset.BackendFunc(func(context.Context, *ruleset.Delta) error { return nil }))
	must.Do(b, idle.Sync(context.Background()))
	var took, above time.Duration
	for b.Loop() {
		// Many changes, so that the result is stable with -benchtime 1x.
		for range times {
			n++
			if n%2 == 0 {
				r.set(svc(1), 1, eps...)
			} else {
				r.set(svc(1), 1, append(eps, -20)...)
			}
			start := time.Now()
			must.Do(b, idle.Sync(context.Background()))
			above += time.Since(start)
			start = time.Now()
			r.sync()
			took += time.Since(start)
		}
	}
	b.ReportMetric(float64(took)/float64(n)/float64(floor), "x-floor")
	b.ReportMetric(float64(above)/float64(n)/float64(floor), "x-floor-above")
	b.ReportMetric(float64(r.calls()-calls)/float64(n), "requests/op")
}

// benchConnections opens connections from another host to the last of many Services. The floor
// is connections to the endpoint's own address.
func benchConnections(b *testing.B, services int) {
	lab, hosts := netlab.NewHosts(b, "node", "client", "pod")
	node, client, pod := hosts["node"], hosts["client"], hosts["pod"]
	node.Forward()
	lab.Link(node, "eth0", client, "eth0")
	lab.Link(node, "eth1", pod, "eth0")
	node.Addrs("eth0", "192.0.2.1/24")
	client.Addrs("eth0", "192.0.2.2/24")
	node.Addrs("eth1", "10.244.1.254/24")
	pod.Addrs("eth0", "10.244.1.1/24")
	client.Routes("", "192.0.2.1", "0.0.0.0/0")
	pod.Routes("", "10.244.1.254", "0.0.0.0/0")
	pod.ServeTCP(b, "10.244.1.1:8080", func(net.Conn) {})
	r := newRig(b, node, Config{Families: []tracker.Family{tracker.IPv4}})
	for i := range services {
		r.set(svc(i), i, 1)
	}
	r.sync()
	const times = 200
	open := func(to string) time.Duration {
		start := time.Now()
		for range times {
			c := must.Get(client.Dial(context.Background(), "tcp", "", to))(b)
			c.Close()
		}
		return time.Since(start)
	}
	open("10.244.1.1:8080")
	var floor, took time.Duration
	for b.Loop() {
		floor += open("10.244.1.1:8080")
		took += open(clusterIP(services-1) + ":80")
	}
	b.ReportMetric(float64(took)/float64(floor), "x-floor")
}

// bare makes requests to IPVS over a plain netlink socket.
type bare struct {
	tb     testing.TB
	socket int
	family int
	buf    [4096]byte
}

func newBare(tb testing.TB, h *netlab.Host) *bare {
	tb.Helper()
	c := &bare{tb: tb}
	err := h.Do(func() error {
		f, err := netlink.GenlFamilyGet("IPVS")
		if err != nil {
			return err
		}
		c.family = int(f.ID)
		c.socket, err = unix.Socket(unix.AF_NETLINK, unix.SOCK_RAW, unix.NETLINK_GENERIC)
		return err
	})
	if err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(func() { unix.Close(c.socket) })
	return c
}

// Attributes and commands of include/uapi/linux/ip_vs.h.
func (c *bare) service(vip netip.Addr) []byte {
	return c.request(1, c.virtual(vip))
}

func (c *bare) destination(vip netip.Addr, n int) []byte {
	dest := nl.NewRtAttr(2, nil)
	addr := netip.MustParseAddr(fmt.Sprintf("10.%d.%d.%d", 245+n>>16, n>>8&0xff, n&0xff))
	dest.AddRtAttr(1, addr.AsSlice())
	dest.AddRtAttr(2, binary.BigEndian.AppendUint16(nil, 8080))
	for _, a := range [][2]uint32{{3, 0}, {4, 1}, {5, 0}, {6, 0}} {
		dest.AddRtAttr(int(a[0]), binary.NativeEndian.AppendUint32(nil, a[1]))
	}
	return c.request(5, c.virtual(vip), dest)
}

func (c *bare) virtual(vip netip.Addr) *nl.RtAttr {
	s := nl.NewRtAttr(1, nil)
	s.AddRtAttr(1, binary.NativeEndian.AppendUint16(nil, unix.AF_INET))
	s.AddRtAttr(2, binary.NativeEndian.AppendUint16(nil, inet.TCP))
	s.AddRtAttr(3, vip.AsSlice())
	s.AddRtAttr(4, binary.BigEndian.AppendUint16(nil, 80))
	s.AddRtAttr(6, nl.ZeroTerminated("rr"))
	s.AddRtAttr(7, binary.NativeEndian.AppendUint32(make([]byte, 4), 0xffffffff))
	s.AddRtAttr(8, make([]byte, 4))
	s.AddRtAttr(9, binary.NativeEndian.AppendUint32(nil, 0xffffffff))
	return s
}

func (c *bare) request(cmd uint8, attrs ...*nl.RtAttr) []byte {
	req := nl.NewNetlinkRequest(c.family, unix.NLM_F_ACK)
	req.AddRawData([]byte{cmd, 1, 0, 0})
	for _, a := range attrs {
		req.AddRawData(a.Serialize())
	}
	return req.Serialize()
}

// call sends a request and reads the kernel's acknowledgement.
func (c *bare) call(req []byte) {
	err := unix.Sendto(c.socket, req, 0, &unix.SockaddrNetlink{Family: unix.AF_NETLINK})
	n := 0
	if err == nil {
		n, _, err = unix.Recvfrom(c.socket, c.buf[:], 0)
	}
	if err != nil || n < unix.SizeofNlMsghdr+4 {
		c.tb.Fatalf("netlink: %d bytes, %v", n, err)
	}
	if errno := -int32(binary.NativeEndian.Uint32(c.buf[unix.SizeofNlMsghdr:])); errno != 0 {
		c.tb.Fatalf("netlink: %v", unix.Errno(errno))
	}
}
