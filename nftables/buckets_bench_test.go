//go:build linux

package nftables

import (
	"context"
	"fmt"
	"math"
	"math/rand/v2"
	"net"
	"net/netip"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	v1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"

	"github.com/go-proxier/proxier/internal/testing/must"
	"github.com/go-proxier/proxier/internal/testing/netlab"
	"github.com/go-proxier/proxier/nftables/internal/layout"
	"github.com/go-proxier/proxier/tracker"
)

// byPort returns a hook that makes every Service choose by a hash.
func byPort(buckets uint16) func(*v1.Service, *v1.ServicePort, *tracker.ServicePort) error {
	return func(_ *v1.Service, _ *v1.ServicePort, p *tracker.ServicePort) error {
		p.Hash, p.HashBuckets = tracker.HashSourcePort, buckets
		return nil
	}
}

// kernelMemory returns the kernel's own memory in bytes (proc(5), Slab, VmallocUsed and
// Percpu). Other processes change it, too.
func kernelMemory() float64 {
	text, _ := os.ReadFile("/proc/meminfo")
	sum := 0.0
	for line := range strings.Lines(string(text)) {
		var kb float64
		name, value, _ := strings.Cut(line, ":")
		if _, err := fmt.Sscanf(value, "%f kB", &kb); err == nil && (name == "Slab" || name == "VmallocUsed" || name == "Percpu") {
			sum += kb * 1024
		}
	}
	return sum
}

// BenchmarkHashed measures a cold start of hashed Services with 10 endpoints each, compared
// with as many bare elements, and then one endpoint that comes and goes.
func BenchmarkHashed(b *testing.B) {
	for _, c := range []struct {
		services int
		buckets  uint16
	}{{1000, 251}, {1000, 509}, {10000, 251}, {10000, 509}} {
		w := newWorld(worldSize{c.services, 10})
		name := fmt.Sprintf("services=%d/buckets=%d/", c.services, c.buckets)
		b.Run(name+"cold", func(b *testing.B) {
			h := netlab.NewHost(b)
			count := 0
			memory := 0.0
			for b.Loop() {
				b.StopTimer()
				clean(b, h)
				before := kernelMemory()
				b.StartTimer()
				p := newPipeline(b, h.File(), byPort(c.buckets))
				p.take(w)
				p.sync(b)
				b.StopTimer()
				memory = kernelMemory() - before
				count = p.elements()
				p.backend.Close()
				b.StartTimer()
			}
			b.StopTimer()
			if count < c.services*int(c.buckets) {
				b.Fatalf("%d elements", count)
			}
			b.ReportMetric(float64(count), "elements")
			b.ReportMetric(memory/float64(count), "kernel-B/element")
			clean(b, h)
			b.ReportMetric(float64(floorOf(b, h, count)), "floor-ns/op")
			clean(b, h)
		})
		b.Run(name+"change", func(b *testing.B) {
			h := netlab.NewHost(b)
			p := newPipeline(b, h.File(), byPort(c.buckets))
			defer p.backend.Close()
			p.take(w)
			p.sync(b)
			less := w.slices[0].DeepCopy()
			less.Endpoints = less.Endpoints[:9]
			both := []*discovery.EndpointSlice{less, w.slices[0]}
			n := 0
			for b.Loop() {
				p.tracker.SetSlice(both[n%2])
				p.sync(b)
				n++
			}
			clean(b, h)
		})
	}
}

// BenchmarkConnections makes TCP connections to 10 endpoints: directly, through two Services
// that choose at random, through Services that choose by hashes, and through a Service of 11
// endpoints whose connections are not counted. They take turns of 50 connections, in another
// order each round, so that other load on the machine affects all alike.
//
// It reports the connections in a second (the median of the rounds), and their ratio to the
// first Service that chooses at random: its median and the 95 % error of the median (the notch
// of a box plot, 1.57 times the distance of the quartiles divided by the root of the number of
// rounds; McGill, Tukey and Larsen, 1978). The second Service that chooses at random shows how
// reliable the error is. A difference of one in a hundred shows after about 1,000 rounds
// (-benchtime 1000x).
func BenchmarkConnections(b *testing.B) {
	h := netlab.NewHost(b)
	es := benchSlice(0, 0)
	for i := range 11 {
		a := netip.AddrFrom4([4]byte{192, 168, 9, byte(i + 1)})
		must.Do(b, h.AddAddr("lo", netip.PrefixFrom(a, 32)))
		es.Endpoints = append(es.Endpoints, discovery.Endpoint{Addresses: []string{a.String()}})
		h.ServeTCP(b, netip.AddrPortFrom(a, 8080).String(), func(net.Conn) {})
	}
	// The cluster IPs need a route.
	must.Do(b, h.AddRoute(netip.MustParsePrefix("10.96.0.0/16"), netip.Addr{}, "lo"))
	hashes := map[string]tracker.Hash{"service-3": tracker.HashSource, "service-4": tracker.HashSourcePort}
	p := newPipeline(b, h.File(), func(s *v1.Service, _ *v1.ServicePort, p *tracker.ServicePort) error {
		p.Hash = hashes[s.Name]
		return nil
	})
	defer p.backend.Close()
	ways := []struct{ name, to string }{{"direct", es.Endpoints[0].Addresses[0] + ":8080"}}
	w := &world{}
	for i, name := range []string{"random", "random-again", "by-source", "by-port", "uncounted"} {
		s, slice := benchService(i+1), es.DeepCopy()
		if name != "uncounted" {
			slice.Endpoints = slice.Endpoints[:10]
		}
		slice.Name, slice.Labels[discovery.LabelServiceName] = s.Name, s.Name
		w.services, w.slices = append(w.services, s), append(w.slices, slice)
		ways = append(ways, struct{ name, to string }{name, s.Spec.ClusterIP + ":80"})
	}
	p.take(w)
	p.sync(b)
	stopCounting(b, h, layout.Handler{Buckets: 11})

	const batch = 50
	took := make([][]float64, len(ways)) // seconds, by way and round
	for b.Loop() {
		for _, at := range rand.Perm(len(ways)) {
			start := time.Now()
			for range batch {
				c := must.Get(h.Dial(context.Background(), "tcp", "", ways[at].to))(b)
				_ = c.(*net.TCPConn).SetLinger(0)
				c.Close()
			}
			took[at] = append(took[at], time.Since(start).Seconds())
		}
	}
	quantile := func(list []float64, q float64) float64 {
		list = slices.Sorted(slices.Values(list))
		return list[int(q*float64(len(list)-1))]
	}
	for at, way := range ways {
		b.ReportMetric(batch/quantile(took[at], 0.5), way.name+"/s")
		var ratio []float64
		for round, base := range took[1] {
			ratio = append(ratio, base/took[at][round])
		}
		if at == 1 {
			continue
		}
		b.ReportMetric(100*quantile(ratio, 0.5), way.name+"-%")
		off := 1.57 * (quantile(ratio, 0.75) - quantile(ratio, 0.25)) / math.Sqrt(float64(len(ratio)))
		b.ReportMetric(100*off, way.name+"-off-%")
	}
}

// stopCounting removes from a pool's chain the rules that count connections: those that do not
// translate.
func stopCounting(b *testing.B, h *netlab.Host, pool layout.Handler) {
	b.Helper()
	nft := func(command ...string) string {
		out, err := h.Run(b, "nft", command...)
		if err != nil {
			b.Fatalf("nft %s: %v: %s", command, err, out)
		}
		return out
	}
	chain := []string{"ip", DefaultTable, pool.Chain()}
	var handles []string
	translate := 0
	for line := range strings.Lines(nft(append([]string{"-a", "list", "chain"}, chain...)...)) {
		rule, handle, found := strings.Cut(strings.TrimSpace(line), " # handle ")
		switch {
		case !found || strings.HasPrefix(rule, "chain "):
		case strings.Contains(rule, "dnat"):
			translate++
		default:
			handles = append(handles, handle)
		}
	}
	if len(handles) == 0 || translate == 0 {
		b.Fatalf("chain %s has %d rules that count and %d that translate", pool.Chain(), len(handles), translate)
	}
	for _, handle := range handles {
		nft(append(append([]string{"delete", "rule"}, chain...), "handle", handle)...)
	}
}
