package ruleset

import (
	"context"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"runtime"
	"sync"
	"testing"

	v1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"

	"github.com/go-proxier/proxier/internal/testing/must"
	"github.com/go-proxier/proxier/tracker"
)

// size is the size of a world.
type size struct{ services, endpoints int }

func (s size) String() string {
	return fmt.Sprintf("services=%d/endpoints=%d", s.services, s.endpoints)
}

var sizes = []size{{1000, 10}, {10000, 10}, {45000, 1}, {5000, 50}}

func serviceN(i int) *v1.Service {
	return service(fmt.Sprintf("s%05d", i), netip.AddrFrom4([4]byte{172, 30, byte(i >> 8), byte(i)}).String())
}

func sliceN(i, endpoints int, node string) *discovery.EndpointSlice {
	list := make([]string, endpoints)
	for j := range list {
		k := i*endpoints + j
		list[j] = netip.AddrFrom4([4]byte{10, byte(k >> 16), byte(k >> 8), byte(k)}).String()
	}
	return sliceOn(fmt.Sprintf("s%05d", i), node, list...)
}

// fill returns a synced world of a size.
func fill(t testing.TB, s size) (*tracker.Tracker, *Engine) {
	t.Helper()
	tr, e := world(t, Config{LocalTraffic: LocalTraffic{Bridge: "cni0"}}, tracker.NodeInfo{Name: "n1"})
	for i := range s.services {
		tr.SetService(serviceN(i))
		tr.SetSlice(sliceN(i, s.endpoints, "n2"))
	}
	return tr, e
}

var discard = BackendFunc(func(context.Context, *Delta) error { return nil })

// TestChangeCostIsConstant checks that a change of one endpoint touches one Service,
// and allocates as much with many Services as with few, with indexes in use and without.
func TestChangeCostIsConstant(t *testing.T) {
	type cost struct{ allocs, bytes, changes, recompiled float64 }
	measure := func(s size, indexed bool) cost {
		tr, e := fill(t, s)
		b := &recorder{}
		c := e.Attach("b", b)
		must.Do(t, c.Sync(t.Context()))
		before := e.Snapshot()
		a, z := sliceN(7, s.endpoints, "n2"), sliceN(7, s.endpoints, "n2")
		z.Endpoints[0].Addresses[0] = "10.255.255.1"
		tr.SetSlice(z)
		b.take()
		must.Do(t, c.Sync(t.Context()))
		out := cost{changes: float64(len(b.take()[0].Changes))}
		for i, svc := range e.Snapshot().Ports {
			if svc != before.Ports[i] {
				out.recompiled++
			}
		}
		c.backend = discard
		const rounds = 200
		var m0, m1 runtime.MemStats
		flip := func() {
			a, z = z, a
			tr.SetSlice(z)
			must.Do(t, c.Sync(t.Context()))
			if !indexed {
				return
			}
			at := netip.AddrPortFrom(netip.MustParseAddr(z.Endpoints[0].Addresses[0]), 8080)
			if len(c.LookupEndpoint(at, v1.ProtocolTCP)) != 1 {
				t.Fatal("the endpoint is not found")
			}
			if svc, _ := c.Lookup(netip.MustParseAddrPort("172.30.0.7:80"), v1.ProtocolTCP); svc == nil {
				t.Fatal("the frontend is not found")
			}
		}
		flip()
		out.allocs = testing.AllocsPerRun(rounds, flip)
		runtime.ReadMemStats(&m0)
		for range rounds {
			flip()
		}
		runtime.ReadMemStats(&m1)
		out.bytes = float64(m1.TotalAlloc-m0.TotalAlloc) / rounds
		return out
	}
	for _, indexed := range []bool{false, true} {
		few, many := measure(size{10, 10}, indexed), measure(size{3000, 10}, indexed)
		t.Logf("indexed %t: 10 services: %+v; 3000 services: %+v", indexed, few, many)
		if many.changes != 1 || many.recompiled != 1 {
			t.Errorf("one endpoint changed %v services, compiled %v", many.changes, many.recompiled)
		}
		if many.allocs > few.allocs+2 || many.bytes > few.bytes*1.5+500 {
			t.Errorf("indexed %t: one endpoint costs %+v with many services, %+v with few", indexed, many, few)
		}
	}
}

// TestConcurrentUseConverges is for the race detector: it uses everything
// concurrently. In the end all cursors must agree.
func TestConcurrentUseConverges(t *testing.T) {
	tr, e := world(t, Config{}, tracker.NodeInfo{Name: "n1"})
	var wg sync.WaitGroup
	work := func(f func(i int)) {
		wg.Go(func() {
			for i := range 300 {
				f(i)
			}
		})
	}
	e.Notify(func() {})
	failing := BackendFunc(func(_ context.Context, d *Delta) error {
		for _, c := range d.Changes {
			for range c.Removed() {
			}
			for range c.GoneFrontends() {
			}
			if c.Key.Name == "s00003" && d.Gen%3 == 0 {
				return &PartialError{Failed: map[tracker.Key]error{c.Key: errInjected}}
			}
		}
		if d.Gen%7 == 0 {
			return errInjected
		}
		return nil
	})
	c1, c2 := e.Attach("1", failing), e.Attach("2", discard)
	work(func(i int) { tr.SetService(serviceN(i % 10)) })
	work(func(i int) { tr.DeleteService(name(serviceN(i % 10).Name)) })
	work(func(i int) { tr.SetSlice(sliceN(i%10, i%4, "n2")) })
	work(func(i int) { tr.SetNode(tracker.NodeInfo{Name: "n1", Zone: fmt.Sprint(i % 3)}) })
	work(func(i int) { e.SetServiceCIDRs(prefixes("172.30.0.0/16", "172.31.0.0/16")[:i%2+1], nil) })
	work(func(i int) { _ = c1.Sync(t.Context()) })
	work(func(i int) {
		c1.Port(key("s00003", tracker.IPv4))
		c1.Lookup(netip.MustParseAddrPort("172.30.0.3:80"), v1.ProtocolTCP)
		c1.LookupEndpoint(netip.MustParseAddrPort("10.0.0.3:8080"), v1.ProtocolTCP)
	})
	work(func(i int) { _ = c1.Sync(t.Context()) })
	work(func(i int) {
		if i%50 == 0 {
			c2.Resync()
		}
		if err := c2.Sync(t.Context()); err != nil {
			t.Error(err)
		}
	})
	work(func(i int) {
		c := e.Attach("3", discard)
		if err := c.Sync(t.Context()); err != nil {
			t.Error(err)
		}
		c.OnSync(nil)
		c.Detach()
	})
	work(func(i int) {
		s := e.Snapshot()
		s.Trace(Packet{From: addrs("1.1.1.1")[0], To: netip.MustParseAddrPort("172.30.0.1:80"), Protocol: v1.ProtocolTCP})
	})
	wg.Wait()
	p := newPlane(t, rand.New(rand.NewPCG(1, 1)), "last", true, 0)
	must.Do(t, e.Attach("last", p).Sync(t.Context()))
	p.compare(e.Snapshot())
}

// BenchmarkOneEndpointChanged measures the time from setting an EndpointSlice to the
// end of a Sync with a backend that does nothing.
func BenchmarkOneEndpointChanged(b *testing.B) {
	for _, s := range sizes {
		b.Run(s.String(), func(b *testing.B) {
			tr, e := fill(b, s)
			changes := 0
			c := e.Attach("b", BackendFunc(func(_ context.Context, d *Delta) error {
				changes += len(d.Changes)
				return nil
			}))
			must.Do(b, c.Sync(b.Context()))
			changes = 0
			a, z := sliceN(7, s.endpoints, "n2"), sliceN(7, s.endpoints, "n2")
			z.Endpoints[0].Addresses[0] = "10.255.255.1"
			b.ReportAllocs()
			n := 0
			for b.Loop() {
				a, z = z, a
				tr.SetSlice(a)
				must.Do(b, c.Sync(b.Context()))
				n++
			}
			if changes != n {
				b.Fatalf("%d changes in %d syncs", changes, n)
			}
		})
	}
}

// BenchmarkFullSync compiles everything for a new engine (first) and offers all of it
// to a backend again (again).
func BenchmarkFullSync(b *testing.B) {
	for _, s := range sizes {
		b.Run("again/"+s.String(), func(b *testing.B) {
			_, e := fill(b, s)
			c := e.Attach("b", discard)
			must.Do(b, c.Sync(b.Context()))
			b.ReportAllocs()
			for b.Loop() {
				c.Resync()
				must.Do(b, c.Sync(b.Context()))
			}
		})
		b.Run("first/"+s.String(), func(b *testing.B) {
			b.ReportAllocs()
			for b.Loop() {
				b.StopTimer()
				_, e := fill(b, s)
				c := e.Attach("b", discard)
				b.StartTimer()
				must.Do(b, c.Sync(b.Context()))
			}
		})
	}
}
