//go:build linux

package nftables

import (
	"encoding/binary"
	"fmt"
	"net/netip"
	"runtime"
	"testing"

	"github.com/go-proxier/proxier/internal/inet"
	"github.com/go-proxier/proxier/internal/nft"
	"github.com/go-proxier/proxier/internal/testing/backendtest"
	"github.com/go-proxier/proxier/internal/testing/must"
	"github.com/go-proxier/proxier/internal/testing/netlab"
	"github.com/go-proxier/proxier/nftables/internal/kernel"
	"github.com/go-proxier/proxier/nftables/internal/layout"
	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/tracker"
)

// BenchmarkRoom measures the kernel memory of a map without elements, for each element that it has
// room for.
func BenchmarkRoom(b *testing.B) {
	for _, size := range []int{1 << 16, 1 << 18, 1 << 20} {
		b.Run(fmt.Sprintf("size=%d", size), func(b *testing.B) {
			h := netlab.NewHost(b)
			conn := must.Get(kernel.Dial(h.File(), kernel.SendBuffer))(b)
			defer conn.Close()
			memory := 0.0
			for b.Loop() {
				before := kernelMemory()
				makeFloor(b, conn, size)
				memory = kernelMemory() - before
				b.StopTimer()
				must.Do(b, Cleanup(b.Context(), Config{NetNS: h.File(), Table: "floor", Families: []tracker.Family{tracker.IPv4}}))
				b.StartTimer()
			}
			b.ReportMetric(memory/float64(size), "kernel-B/element")
		})
	}
}

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
	counters := &nft.Elements{}
	for i := range services {
		var a [4]byte
		binary.BigEndian.PutUint32(a[:], 10<<24|96<<16+uint32(i))
		key := layout.Octets{}.Addr(netip.AddrFrom4(a)).Proto(inet.TCP).Port(80)
		counters.AddCounter(key.Bytes(), onePacket())
	}
	w := kernel.NewWriter(DefaultTable)
	w.AddElements(tracker.IPv4, layout.Connections, counters)
	must.Do(b, p.backend.conn.Commit(w))
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

// BenchmarkChangeBesideAttacker: see [backendtest.ChangeBesideAttacker].
func BenchmarkChangeBesideAttacker(b *testing.B) {
	backendtest.ChangeBesideAttacker(b, func(tb testing.TB) ruleset.Backend {
		backend := must.Get(New(tb.Context(), Config{NetNS: netlab.NewHost(tb).File(), Families: []tracker.Family{tracker.IPv4}}))(tb)
		tb.Cleanup(func() { backend.Close() })
		return backend
	})
}
