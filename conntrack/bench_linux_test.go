package conntrack

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"sync/atomic"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"github.com/go-proxier/proxier/internal/inet"
	"github.com/go-proxier/proxier/internal/nfnl"
	"github.com/go-proxier/proxier/internal/nfnl/tuple"
	"github.com/go-proxier/proxier/internal/testing/must"
	"github.com/go-proxier/proxier/internal/testing/netlab"
	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/tracker"
)

// fill puts n flows into the table: one in every, if that is not 0, to the first
// endpoint of the Service at 10.96.0.1:53 and the others to its second.
func fill(b *testing.B, h *netlab.Host, n, every int, protocol uint8) {
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
			start := len(req)
			req = nfnl.Begin(req, unix.NFNL_SUBSYS_CTNETLINK, nl.IPCTNL_MSG_CT_NEW, unix.NLM_F_ACK|unix.NLM_F_CREATE, first+uint32(j-i), unix.AF_INET)
			req = tuple.Append(req, nl.CTA_TUPLE_ORIG, protocol, f.Src, f.Dst)
			req = tuple.Append(req, nl.CTA_TUPLE_REPLY, protocol, f.ReplySrc, f.ReplyDst)
			req = nfnl.AppendUint32(req, ctaTimeout, 512)
			nfnl.End(req, start)
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
				fill(b, h, flows, every, inet.UDP)
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
	fill(b, h, flows, every, inet.UDP)
}

// BenchmarkLibraryDump reads the kernel's table: UDP flows, as many TCP flows (which the
// kernel leaves out), and UDP flows by github.com/vishvananda/netlink. Its result justifies
// the decoder in this package.
func BenchmarkLibraryDump(b *testing.B) {
	const flows = 200000
	for _, c := range []struct {
		name     string
		protocol uint8
		want     int
	}{{"UDP/ours", inet.UDP, flows}, {"TCP/ours", inet.TCP, 0}} {
		b.Run(fmt.Sprintf("flows=%d/%s", flows, c.name), func(b *testing.B) {
			h := netlab.NewHost(b)
			fill(b, h, flows, 0, c.protocol)
			k := kernelAt(b, h)
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
		fill(b, h, flows, 0, inet.UDP)
		library := libraryAt(b, h)
		b.ReportAllocs()
		for b.Loop() {
			got, err := library.ConntrackTableList(netlink.ConntrackTable, unix.AF_INET)
			if err != nil || len(got) != flows {
				b.Fatalf("%v, %d flows", err, len(got))
			}
		}
	})
}

func libraryAt(b *testing.B, h *netlab.Host) *netlink.Handle {
	b.Helper()
	var library *netlink.Handle
	must.Do(b, h.Do(func() (err error) { library, err = netlink.NewHandle(unix.NETLINK_NETFILTER); return err }))
	b.Cleanup(library.Close)
	return library
}

// BenchmarkLibraryDelete finds and deletes 1,000 of 200,000 flows, those to one of a
// Service's endpoints. It compares with the filtered delete of
// github.com/vishvananda/netlink.
func BenchmarkLibraryDelete(b *testing.B) {
	const flows, stale = 200000, 1000
	gone := netip.MustParseAddr("10.0.0.1")
	run := func(name string, open func(*testing.B, *netlab.Host) func() (int, error)) {
		b.Run(fmt.Sprintf("flows=%d/stale=%d/%s", flows, stale, name), func(b *testing.B) {
			h := netlab.NewHost(b)
			fill(b, h, flows, flows/stale, inet.UDP)
			remove := open(b, h)
			b.ReportAllocs()
			for b.Loop() {
				if n, err := remove(); err != nil || n != stale {
					b.Fatalf("%v, %d deleted", err, n)
				}
				b.StopTimer()
				fillStale(b, h, flows, flows/stale)
				b.StartTimer()
			}
		})
	}
	run("ours", func(b *testing.B, h *netlab.Host) func() (int, error) {
		k := kernelAt(b, h)
		return func() (int, error) {
			var doomed []Flow
			if err := k.Dump(b.Context(), tracker.IPv4, func(f *Flow) {
				if f.ReplySrc.Addr() == gone {
					doomed = append(doomed, *f)
				}
			}); err != nil {
				return 0, err
			}
			return k.Delete(b.Context(), doomed)
		}
	})
	run("library", func(b *testing.B, h *netlab.Host) func() (int, error) {
		library := libraryAt(b, h)
		filter := &netlink.ConntrackFilter{}
		must.Do(b, errors.Join(filter.AddProtocol(inet.UDP), filter.AddIP(netlink.ConntrackReplySrcIP, gone.AsSlice())))
		return func() (int, error) {
			n, err := library.ConntrackDeleteFilters(netlink.ConntrackTable, unix.AF_INET, filter)
			return int(n), err
		}
	})
}

func BenchmarkDecode(b *testing.B) {
	for _, f := range []Flow{toOne, sixToOne} {
		b.Run(tracker.FamilyOf(f.Dst.Addr()).String(), func(b *testing.B) {
			m, _, err := nfnl.Next(encode(&f))
			if err != nil {
				b.Fatal(err)
			}
			var got Flow
			b.ReportAllocs()
			for b.Loop() {
				if err := decodeFlow(m.Attrs(), &got); err != nil || got.Dst != f.Dst {
					b.Fatal(err)
				}
			}
		})
	}
}

// flushing flushes after each delta, inside Apply, to compare with Run.
type flushing struct {
	ruleset.Backend
	cleaner *Cleaner
}

func (f flushing) Apply(ctx context.Context, d *ruleset.Delta) error {
	return errors.Join(f.Backend.Apply(ctx, d), f.cleaner.Flush(ctx))
}

// besideFlows runs f with a Cleaner of a kernel's table with 120,000 flows, and a backend that it
// follows: by Run, or with a flush in each Apply.
func besideFlows(b *testing.B, f func(b *testing.B, plane ruleset.Backend, dumps func() int)) {
	for _, name := range []string{"flush in each Apply", "Run"} {
		b.Run(name, func(b *testing.B) {
			h := netlab.NewHost(b)
			fill(b, h, 120000, 0, inet.UDP)
			var dumps atomic.Int64
			c := cleanerAt(b, h, &Hooks{Flushed: func(i FlushInfo) { dumps.Add(int64(i.Dumps)) }})
			plane := c.Wrap(ruleset.BackendFunc(func(context.Context, *ruleset.Delta) error { return nil }))
			if name == "Run" {
				ctx, cancel := context.WithCancel(b.Context())
				ended := make(chan error)
				go func() { ended <- c.Run(ctx) }()
				defer func() { cancel(); <-ended }()
			} else {
				plane = flushing{plane, c}
			}
			f(b, plane, func() int { return int(dumps.Load()) })
		})
	}
}

// BenchmarkChangeBesideFlippingEndpoint measures how long a change waits for the deltas of an endpoint
// of a UDP Service that goes or returns ten times a second, beside 120,000 flows.
func BenchmarkChangeBesideFlippingEndpoint(b *testing.B) {
	besideFlows(b, func(b *testing.B, plane ruleset.Backend, _ func() int) {
		both, two := dns("10.0.0.1:53", "10.0.0.2:53"), dns("10.0.0.2:53")
		var waits []time.Duration
		for b.Loop() {
			for range 20 {
				start := time.Now()
				for _, ch := range []ruleset.Change{change(both, two), change(two, both)} {
					must.Do(b, plane.Apply(b.Context(), &ruleset.Delta{Node: everyAddress(), Changes: []ruleset.Change{ch}}))
				}
				waits = append(waits, time.Since(start))
				time.Sleep(100 * time.Millisecond)
			}
		}
		slices.Sort(waits)
		b.ReportMetric(float64(waits[len(waits)/2].Microseconds())/1000, "ms-median")
		b.ReportMetric(float64(waits[len(waits)-1].Microseconds())/1000, "ms-longest")
	})
}
