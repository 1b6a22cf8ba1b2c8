package conntrack

import (
	"fmt"
	"net/netip"
	"testing"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/go-proxier/proxier/internal/netlab"
	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/tracker"
)

// fill puts n flows into the table: one in every, if that is not 0, to the first
// endpoint of the Service at 10.96.0.1:53 and the others to its second.
func fill(b *testing.B, h *netlab.Host, n, every int, protocol uint8) {
	b.Helper()
	t, err := openKernel(h.File())
	if err != nil {
		b.Fatal(err)
	}
	defer t.Close()
	k := t.(*kernel)
	const batch = 100
	for i := 0; i < n; i += batch {
		var req []byte
		for j := i; j < i+batch; j++ {
			client := netip.AddrPortFrom(netip.AddrFrom4([4]byte{10, 9, byte(j >> 16), byte(j >> 8)}), uint16(1000+j&255))
			f := flow(client.String(), "10.96.0.1:53", "10.0.0.2:53")
			if every != 0 && j%every == 0 {
				f.ReplySrc = ap("10.0.0.1:53")
			}
			k.seq++
			start := len(req)
			req = beginMessage(req, ctNew, flagRequest|flagAck|unix.NLM_F_CREATE, k.seq, afInet)
			req = appendTuple(req, ctaTupleOrig, protocol, f.Src, f.Dst)
			req = appendTuple(req, ctaTupleReply, protocol, f.ReplySrc, f.ReplyDst)
			req = endMessage(appendAttr(req, ctaTimeout, 0, 0, 2, 0), start)
		}
		if err := k.exchange(b.Context(), req, batch, func(m message) (bool, error) { return true, m.err() }); err != nil {
			b.Fatal(err)
		}
	}
}

// BenchmarkFlush is a change that has the kernel's table read, with nothing and
// with a part of it to be deleted.
func BenchmarkFlush(b *testing.B) {
	before, after := dns("10.0.0.1:53", "10.0.0.2:53"), dns("10.0.0.2:53")
	for _, flows := range []int{20000, 100000} {
		for _, stale := range []int{0, 1000, 20000} {
			b.Run(fmt.Sprintf("flows=%d/stale=%d", flows, stale), func(b *testing.B) {
				h := netlab.NewHost(b)
				var info Info
				c := cleanerAt(b, h, &Trace{Flushed: func(i Info) { info = i }})
				every := 0
				if stale > 0 {
					every = flows / stale
				}
				fill(b, h, flows, every, protoUDP)
				b.ReportAllocs()
				for b.Loop() {
					c.Record(&ruleset.Delta{Changes: []ruleset.Change{change(before, after)}}, nil)
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
	if err := h.Do(func() error { return netlink.ConntrackTableFlush(netlink.ConntrackTable) }); err != nil {
		b.Fatal(err)
	}
	fill(b, h, flows, every, protoUDP)
}

// BenchmarkDump is reading the kernel's table alone: UDP flows, as many TCP flows
// (which the kernel leaves out), and through github.com/vishvananda/netlink.
func BenchmarkDump(b *testing.B) {
	const flows = 100000
	for _, c := range []struct {
		name     string
		protocol uint8
		want     int
	}{{"UDP", unix.IPPROTO_UDP, flows}, {"TCP", unix.IPPROTO_TCP, 0}} {
		b.Run(fmt.Sprintf("flows=%d/%s", flows, c.name), func(b *testing.B) {
			h := netlab.NewHost(b)
			fill(b, h, flows, 0, c.protocol)
			k, err := openKernel(h.File())
			if err != nil {
				b.Fatal(err)
			}
			defer k.Close()
			b.ReportAllocs()
			for b.Loop() {
				n := 0
				if err := k.Dump(b.Context(), tracker.IPv4, func(*Flow) { n++ }); err != nil || n != c.want {
					b.Fatalf("%v, %d flows", err, n)
				}
			}
		})
	}
	b.Run(fmt.Sprintf("flows=%d/UDP/library", flows), func(b *testing.B) {
		h := netlab.NewHost(b)
		fill(b, h, flows, 0, unix.IPPROTO_UDP)
		var nl *netlink.Handle
		if err := h.Do(func() (err error) { nl, err = netlink.NewHandle(unix.NETLINK_NETFILTER); return err }); err != nil {
			b.Fatal(err)
		}
		defer nl.Close()
		b.ReportAllocs()
		for b.Loop() {
			got, err := nl.ConntrackTableList(netlink.ConntrackTable, unix.AF_INET)
			if err != nil || len(got) != flows {
				b.Fatalf("%v, %d flows", err, len(got))
			}
		}
	})
}
