package conntrack

import (
	"fmt"
	"net/netip"
	"testing"

	"github.com/vishvananda/netlink"

	"github.com/go-proxier/proxier/internal/nfnl"
	"github.com/go-proxier/proxier/internal/testing/must"
	"github.com/go-proxier/proxier/internal/testing/netlab"
	"github.com/go-proxier/proxier/ruleset"
)

// fill puts n flows into the table: one in every, if that is not 0, to the first
// endpoint of the Service at 10.96.0.1:53 and the others to its second.
func fill(b *testing.B, h *netlab.Host, n, every int) {
	b.Helper()
	k := kernelAt(b, h)
	const batch = 100
	for i := 0; i < n; i += batch {
		var req []byte
		first := k.conn.Sequence(batch)
		for j := i; j < i+batch; j++ {
			client := netip.AddrPortFrom(netip.AddrFrom4([4]byte{10, 9, byte(j >> 16), byte(j >> 8)}), uint16(1000+j&255))
			f := flow(client.String(), "10.96.0.1:53", "10.0.0.2:53")
			if every != 0 && j%every == 0 {
				f.ReplySrc = ap("10.0.0.1:53")
			}
			req = appendCreate(req, first+uint32(j-i), f)
		}
		must.Do(b, k.conn.Exchange(b.Context(), req, first, batch, nfnl.Message.Err))
	}
}

// BenchmarkFlush measures a change after which Flush reads the kernel's table, with no
// stale flows and with some.
func BenchmarkFlush(b *testing.B) {
	before, after := dns("10.0.0.1:53", "10.0.0.2:53"), dns("10.0.0.2:53")
	for _, flows := range []int{20000, 100000} {
		for _, stale := range []int{0, 1000, 20000} {
			b.Run(fmt.Sprintf("flows=%d/stale=%d", flows, stale), func(b *testing.B) {
				h := netlab.NewHost(b)
				var info FlushInfo
				c := cleanerAt(b, h, &Hooks{Flushed: func(i FlushInfo) { info = i }})
				every := 0
				if stale > 0 {
					every = flows / stale
				}
				fill(b, h, flows, every)
				b.ReportAllocs()
				for b.Loop() {
					c.note(&ruleset.Delta{Changes: []ruleset.Change{change(before, after)}}, nil)
					if err := c.Flush(b.Context()); err != nil || info.Deleted != stale {
						b.Fatalf("%v, %+v", err, info)
					}
					if stale > 0 {
						b.StopTimer()
						fillStale(b, h, flows, every)
						b.StartTimer()
					}
				}
			})
		}
	}
}

// fillStale puts back what a flush deleted.
func fillStale(b *testing.B, h *netlab.Host, flows, every int) {
	b.Helper()
	must.Do(b, h.Do(func() error { return netlink.ConntrackTableFlush(netlink.ConntrackTable) }))
	fill(b, h, flows, every)
}
