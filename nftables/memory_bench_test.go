//go:build linux

package nftables

import (
	"fmt"
	"testing"

	"github.com/go-proxier/proxier/internal/testing/netlab"
	"github.com/go-proxier/proxier/nftables/internal/kernel"
	"github.com/go-proxier/proxier/tracker"
)

// BenchmarkRoom measures the kernel memory of a map without elements, for each element that it has
// room for.
func BenchmarkRoom(b *testing.B) {
	for _, size := range []int{1 << 16, 1 << 18, 1 << 20} {
		b.Run(fmt.Sprintf("size=%d", size), func(b *testing.B) {
			h := netlab.NewHost(b)
			conn, err := kernel.Dial(h.File(), kernel.SendBuffer)
			if err != nil {
				b.Fatal(err)
			}
			defer conn.Close()
			memory := 0.0
			for b.Loop() {
				before := kernelMemory()
				makeFloor(b, conn, size)
				memory = kernelMemory() - before
				b.StopTimer()
				err := Cleanup(b.Context(), Config{NetNS: h.File(), Table: "floor", Families: []tracker.Family{tracker.IPv4}})
				if err != nil {
					b.Fatal(err)
				}
				b.StartTimer()
			}
			b.ReportMetric(memory/float64(size), "kernel-B/element")
		})
	}
}
