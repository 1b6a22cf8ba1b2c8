//go:build linux

package nftables

import (
	"context"
	"fmt"
	"net"
	"net/netip"
	"os"
	"strings"
	"testing"

	v1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"

	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/tracker"
)

// newHashedPipeline is newPipeline with a hash for every Service.
func newHashedPipeline(tb testing.TB, netns int, h tracker.Hash, slots uint16) *pipeline {
	tb.Helper()
	p := &pipeline{}
	var err error
	if p.backend, err = New(Config{NetNS: netns, Families: []tracker.Family{tracker.IPv4}}); err != nil {
		tb.Fatal(err)
	}
	hook := func(_ *v1.Service, _ *v1.ServicePort, p *tracker.ServicePort) error {
		p.Hash, p.HashSlots = h, slots
		return nil
	}
	if p.tracker, err = tracker.New(tracker.Config{Node: tracker.NodeInfo{Name: "node-1"}, OnService: hook}); err != nil {
		tb.Fatal(err)
	}
	if p.engine, err = ruleset.NewEngine(ruleset.Config{Tracker: p.tracker}); err != nil {
		tb.Fatal(err)
	}
	p.cursor = p.engine.Attach("nftables", p.backend)
	return p
}

// kernelMemory is what the kernel has for itself, in bytes (proc(5), Slab and
// VmallocUsed). Others' comes and goes, too.
func kernelMemory() float64 {
	text, _ := os.ReadFile("/proc/meminfo")
	sum := 0.0
	for line := range strings.Lines(string(text)) {
		var kb float64
		name, value, _ := strings.Cut(line, ":")
		if _, err := fmt.Sscanf(value, "%f kB", &kb); err == nil && (name == "Slab" || name == "VmallocUsed") {
			sum += kb * 1024
		}
	}
	return sum
}

// BenchmarkHashed measures a cold start of hashed Services with 10 endpoints each,
// beside as many bare elements, and then one endpoint that comes and goes.
func BenchmarkHashed(b *testing.B) {
	for _, c := range []struct {
		services int
		slots    uint16
	}{{1000, 251}, {1000, 1021}, {10000, 251}} {
		w := newWorld(worldSize{c.services, 10})
		name := fmt.Sprintf("services=%d/slots=%d/", c.services, c.slots)
		b.Run(name+"cold", func(b *testing.B) {
			h := newHost(b)
			count := 0
			memory := 0.0
			for b.Loop() {
				b.StopTimer()
				clean(b, h)
				before := kernelMemory()
				b.StartTimer()
				p := newHashedPipeline(b, h.FD(), tracker.HashSourcePort, c.slots)
				p.take(w)
				p.sync(b)
				b.StopTimer()
				memory = kernelMemory() - before
				count = p.elements()
				p.backend.Close()
				b.StartTimer()
			}
			b.StopTimer()
			if count < c.services*int(c.slots) {
				b.Fatalf("%d elements", count)
			}
			b.ReportMetric(float64(count), "elements")
			b.ReportMetric(memory/float64(count), "kernel-B/element")
			clean(b, h)
			b.ReportMetric(float64(floorOf(b, h, count)), "floor-ns/op")
			clean(b, h)
		})
		b.Run(name+"change", func(b *testing.B) {
			h := newHost(b)
			p := newHashedPipeline(b, h.FD(), tracker.HashSourcePort, c.slots)
			defer p.backend.Close()
			p.take(w)
			p.sync(b)
			less := w.slices[0].DeepCopy()
			less.Endpoints = less.Endpoints[:9]
			slices := []*discovery.EndpointSlice{less, w.slices[0]}
			before, n := p.backend.writer.written, 0
			for b.Loop() {
				p.tracker.SetSlice(slices[n%2])
				p.sync(b)
				n++
			}
			b.ReportMetric(float64(p.backend.writer.written-before)/float64(n), "elements/op")
			clean(b, h)
		})
	}
}

// BenchmarkConnections makes TCP connections through Services with 10 endpoints
// that choose at random and by hashes, one after the other, and directly.
func BenchmarkConnections(b *testing.B) {
	h := newHost(b)
	es := benchSlice(0, 0)
	var endpoints []netip.AddrPort
	for i := range 10 {
		a := netip.AddrFrom4([4]byte{192, 168, 9, byte(i + 1)})
		if err := h.AddAddr("lo", netip.PrefixFrom(a, 32)); err != nil {
			b.Fatal(err)
		}
		es.Endpoints = append(es.Endpoints, discovery.Endpoint{Addresses: []string{a.String()}})
		endpoints = append(endpoints, netip.AddrPortFrom(a, 8080))
		l, err := h.Listen("tcp", endpoints[i].String())
		if err != nil {
			b.Fatal(err)
		}
		b.Cleanup(func() { l.Close() })
		go func() {
			for {
				c, err := l.Accept()
				if err != nil {
					return
				}
				c.Close()
			}
		}()
	}
	// The way out that a route to the cluster IP needs.
	if err := h.AddRoute(netip.MustParsePrefix("10.96.0.0/16"), netip.Addr{}, "lo"); err != nil {
		b.Fatal(err)
	}
	connect := func(b *testing.B, to string) {
		for b.Loop() {
			c, err := h.Dial(context.Background(), "tcp", "", to)
			if err != nil {
				b.Fatal(err)
			}
			_ = c.(*net.TCPConn).SetLinger(0)
			c.Close()
		}
		b.ReportMetric(float64(b.N)/b.Elapsed().Seconds(), "connections/s")
	}
	b.Run("direct", func(b *testing.B) { connect(b, endpoints[0].String()) })
	names := map[tracker.Hash]string{tracker.HashNone: "random", tracker.HashSource: "by-source", tracker.HashSourcePort: "by-port"}
	for hash := range tracker.Hash(len(names)) {
		b.Run(names[hash], func(b *testing.B) {
			p := newHashedPipeline(b, h.FD(), hash, 0)
			defer p.backend.Close()
			p.take(&world{services: []*v1.Service{benchService(1)}, slices: nil})
			one := es.DeepCopy()
			one.Labels[discovery.LabelServiceName] = "service-1"
			p.tracker.SetSlice(one)
			p.sync(b)
			connect(b, "10.96.0.1:80")
		})
	}
}
