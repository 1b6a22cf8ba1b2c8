//go:build linux

package nftables

import (
	"encoding/binary"
	"net/netip"
	"runtime"
	"testing"

	v1 "k8s.io/api/core/v1"

	"github.com/go-proxier/proxier/internal/testing/netlab"
	"github.com/go-proxier/proxier/nftables/internal/kernel"
	"github.com/go-proxier/proxier/nftables/internal/layout"
	"github.com/go-proxier/proxier/tracker"
)

// BenchmarkTraffic reads the counters of 10,000 Services that all have had connections, with
// the names in the backend's model and with the names in the kernel. It reports the kernel
// memory of a counter and the number of CPUs, on which it depends.
func BenchmarkTraffic(b *testing.B) {
	const services = 10000
	h := netlab.NewHost(b)
	p := newPipeline(b, h.File())
	defer p.backend.Close()
	p.take(newWorld(worldSize{services, 1}))
	p.sync(b)
	before := kernelMemory()
	counters := &kernel.Elements{}
	for i := range services {
		var a [4]byte
		binary.BigEndian.PutUint32(a[:], 10<<24|96<<16+uint32(i))
		key := layout.Octets{}.Addr(netip.AddrFrom4(a)).Proto(v1.ProtocolTCP).Port(80)
		counters.AddCounter(key.Bytes(), onePacket())
	}
	w := kernel.NewWriter(DefaultTable)
	w.AddElements(tracker.IPv4, layout.Connections, counters)
	if err := p.backend.conn.Commit(w); err != nil {
		b.Fatal(err)
	}
	per := (kernelMemory() - before) / services
	for name, read := range map[string]func() (int, error){
		"backend": func() (int, error) {
			t, err := p.backend.Traffic(b.Context())
			return len(t.Services), err
		},
		"kernel": func() (int, error) {
			t, err := Traffic(b.Context(), p.backend.config)
			return len(t.Services), err
		},
	} {
		b.Run(name, func(b *testing.B) {
			b.ReportAllocs()
			for b.Loop() {
				if n, err := read(); n != services || err != nil {
					b.Fatal(n, err)
				}
			}
			b.ReportMetric(per, "kernel-B/counter")
			b.ReportMetric(float64(runtime.NumCPU()), "CPUs")
		})
	}
}
