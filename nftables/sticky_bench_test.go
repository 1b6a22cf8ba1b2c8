//go:build linux

package nftables

import (
	"fmt"
	"runtime"
	"testing"
	"time"

	v1 "k8s.io/api/core/v1"

	"github.com/go-proxier/proxier/internal/testing/netlab"
)

// BenchmarkAffinityTimeouts has 10,000 Services without affinity, with one affinity timeout, and
// with a timeout each. It reports the time of a cold start and the kernel's memory, and measures
// the change of one endpoint and that of one timeout to a new one.
func BenchmarkAffinityTimeouts(b *testing.B) {
	const services, endpoints = 10000, 2
	timeouts := map[string]func(i int) int32{
		"timeouts=0":     nil,
		"timeouts=1":     func(int) int32 { return 10800 },
		"timeouts=10000": func(i int) int32 { return int32(1000 + i) },
	}
	for _, name := range []string{"timeouts=0", "timeouts=1", "timeouts=10000"} {
		with := timeouts[name]
		for _, change := range []string{"endpoint", "timeout"} {
			if change == "timeout" && with == nil {
				continue
			}
			b.Run(fmt.Sprintf("%s/changed=%s", name, change), func(b *testing.B) {
				h := netlab.NewHost(b)
				w := newWorld(worldSize{services, endpoints})
				for i, s := range w.services {
					if with != nil {
						sticky(with(i))(s)
					}
				}
				before := kernelMemory()
				p := newPipeline(b, h.File())
				defer p.backend.Close()
				began := time.Now()
				p.take(w)
				p.sync(b)
				cold := time.Since(began)
				memory := kernelMemory() - before
				i := services / 2
				variants := [2]*v1.Service{}
				one, other := benchSlice(i, endpoints), benchSlice(i, endpoints)
				other.Endpoints[1].Addresses[0] = "10.250.0.1"
				runtime.GC()
				n := 0
				for b.Loop() {
					n++
					switch {
					case change == "timeout":
						variants[n%2] = w.services[i].DeepCopy()
						sticky(int32(20000 + n%60000))(variants[n%2])
						p.tracker.SetService(variants[n%2])
					case n%2 == 1:
						p.tracker.SetSlice(other)
					default:
						p.tracker.SetSlice(one)
					}
					p.sync(b)
				}
				b.ReportMetric(float64(cold.Milliseconds()), "ms-cold-start")
				b.ReportMetric(memory/1e6, "MB-kernel")
			})
		}
	}
}
