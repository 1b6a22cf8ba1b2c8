//go:build linux

package nftables

import (
	"fmt"
	"os"
	"strings"
	"testing"

	v1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"

	"github.com/go-proxier/proxier/internal/testing/netlab"
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
