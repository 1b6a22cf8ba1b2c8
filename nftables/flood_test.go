//go:build linux

package nftables

import (
	"cmp"
	"context"
	"flag"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"runtime"
	"runtime/debug"
	"sync/atomic"
	"testing"
	"time"

	v1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/go-proxier/proxier/internal/testing/backendtest"
	"github.com/go-proxier/proxier/internal/testing/testtime"
	"github.com/go-proxier/proxier/internal/testing/usage"
	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/ruleset/conformance"
	"github.com/go-proxier/proxier/runner"
	"github.com/go-proxier/proxier/tracker"
)

var (
	flood     = flag.Duration("flood", 0, "change objects for this `time` in TestFloodOfChangesLosesNoConnection, by default 1s, or 3s in its long form")
	floodRate = flag.Int("rate", 1000, "change `n` objects a second in TestFloodOfChangesLosesNoConnection")
)

// flooded is a world with very many Services and a runner that keeps the tables up to date.
// Clients connect to a few of the Services.
type flooded struct {
	*conformance.World
	t       *testing.T
	backend *Backend
	targets []conformance.Target
	pods    []netip.AddrPort
	syncs   atomic.Int64
	// slowest is the longest time until a change was in effect.
	slowest atomic.Int64
}

const (
	calledServices = 100
	calledEach     = 10 // endpoints
)

// newFlooded returns the world with the given number of Services that are not called.
func newFlooded(t *testing.T, services int) *flooded {
	t.Helper()
	f := &flooded{t: t}
	f.World = conformance.NewWorld(t, conformance.Options{Families: []tracker.Family{tracker.IPv4}, New: func(tb testing.TB, env conformance.Env) ruleset.Backend {
		f.backend = newForWorld(tb, env).(*Backend)
		return f.backend
	}})
	for _, p := range f.Pods() {
		for _, port := range p.Ports() {
			f.pods = append(f.pods, netip.AddrPortFrom(p.Addr(tracker.IPv4), port))
		}
	}
	for i := range calledServices {
		s := svc(i)
		s.Spec.ClusterIPs, s.Spec.IPFamilies = s.Spec.ClusterIPs[:1], s.Spec.IPFamilies[:1]
		f.Tracker.SetService(s)
		f.roll(i, 0, false)
		if i%20 == 0 {
			f.targets = append(f.targets, conformance.Target{Addr: netip.MustParseAddrPort(s.Spec.ClusterIP + ":80"), Protocol: v1.ProtocolTCP})
		}
	}
	for i := range services {
		f.Tracker.SetService(floodService(i))
		f.Tracker.SetSlice(benchSlice(floodFirst+i, 10))
	}
	f.Sync()
	return f
}

// floodFirst separates the addresses of other Services from those that are called.
const floodFirst = 1000

func floodService(i int) *v1.Service { return benchService(floodFirst + i) }

// roll sets the endpoints of a called Service after the given number of replacements. They are
// consecutive pods, in slices of one address and port each. If leaving is layout.Set, the next endpoint
// to go terminates and still serves.
func (f *flooded) roll(service, replaced int, leaving bool) {
	name, proto := "p", v1.ProtocolTCP
	for n := range calledEach + 1 {
		es := &discovery.EndpointSlice{
			ObjectMeta: metav1.ObjectMeta{
				Namespace: "ns", Name: fmt.Sprintf("svc-%d-%d", service, (replaced+n)%(calledEach+1)),
				Labels: map[string]string{discovery.LabelServiceName: fmt.Sprintf("svc-%d", service)},
			},
			AddressType: discovery.AddressTypeIPv4,
		}
		pod := f.pods[(service+replaced+n)%len(f.pods)]
		port := int32(pod.Port())
		es.Ports = []discovery.EndpointPort{{Name: &name, Port: &port, Protocol: &proto}}
		serves, ready := true, n != 0 || !leaving
		going := !ready
		if n < calledEach || leaving {
			es.Endpoints = []discovery.Endpoint{{
				Addresses:  []string{pod.Addr().String()},
				Conditions: discovery.EndpointConditions{Ready: &ready, Serving: &serves, Terminating: &going},
			}}
		}
		f.Tracker.SetSlice(es)
	}
}

// run keeps the tables up to date while fn runs, and returns when they are up to date.
func (f *flooded) run(fn func()) {
	f.t.Helper()
	ctx, stop := context.WithCancel(f.t.Context())
	r, err := runner.New(runner.Config{Min: 20 * time.Millisecond, Retry: time.Second, Max: time.Hour, Hooks: &runner.Hooks{SyncDone: func(i runner.RunInfo) {
		f.syncs.Add(1)
		if waited := i.Start.Add(i.Duration).Sub(i.QueuedAt); i.Triggers > 0 && int64(waited) > f.slowest.Load() {
			f.slowest.Store(int64(waited))
		}
		// The last sync below repeats an interrupted one.
		if i.Err != nil && ctx.Err() == nil {
			f.t.Error(i.Err)
		}
	}}}, f.Cursor.Sync)
	if err != nil {
		f.t.Fatal(err)
	}
	f.Tracker.Notify(r.Trigger)
	done := make(chan error)
	go func() { done <- r.Run(ctx) }()
	fn()
	stop()
	<-done
	f.Sync()
}

// TestFloodOfChangesLosesNoConnection changes a thousand objects a second among ten thousand
// Services and makes connections. No connection may fail, memory must not grow, and the tables
// must be right in the end.
func TestFloodOfChangesLosesNoConnection(t *testing.T) {
	// Not parallel, because the test measures the heap.
	defer debug.SetGCPercent(debug.SetGCPercent(100))
	services, length := 10000, 3*time.Second
	if !testtime.Thorough() {
		services, length = 1000, time.Second
	}
	length = cmp.Or(*flood, length)
	f := newFlooded(t, services)
	rng := rand.New(rand.NewPCG(2, 2))
	before := uint64(usage.Heap())
	var peak uint64
	changes, missed := 0, 0
	backendtest.Unharmed(t, f.World, f.targets, func() {
		f.run(func() {
			start := time.Now()
			for last := start; time.Since(start) < length; last = time.Now() {
				due := int(time.Since(start).Seconds()*float64(*floodRate)) - changes
				// Leave out changes for which a busy machine has no time.
				if most := *floodRate / 4; due > most {
					missed += due - most
					due = most
				}
				for range due {
					i := rng.IntN(services)
					switch rng.IntN(20) {
					case 0:
						s := floodService(i)
						s.Spec.Ports[0].Port = int32(80 + rng.IntN(3))
						f.Tracker.SetService(s)
					case 1:
						f.roll(rng.IntN(calledServices), rng.IntN(100), rng.IntN(2) == 0)
					default:
						es := benchSlice(floodFirst+i, 10)
						for n := range es.Endpoints {
							if rng.IntN(5) == 0 {
								es.Endpoints[n].Addresses[0] = netip.AddrFrom4([4]byte{10, 250, byte(rng.IntN(256)), byte(rng.IntN(256))}).String()
							}
						}
						f.Tracker.SetSlice(es)
					}
				}
				changes += due
				var m runtime.MemStats
				if time.Since(last) > 0 && changes%100 < 10 {
					runtime.ReadMemStats(&m)
					peak = max(peak, m.HeapAlloc)
				}
				time.Sleep(10 * time.Millisecond)
			}
		})
	})
	after := uint64(usage.Heap())
	t.Logf("%d changes in %v (%d left out) and %d syncs among %d Services; the longest wait was %v; heap %.1f MB before, %.1f at most, %.1f after",
		changes, length, missed, f.syncs.Load(), services, time.Duration(f.slowest.Load()).Round(time.Millisecond), mb(before), mb(peak), mb(after))
	if after > before+before/4+4<<20 {
		t.Errorf("the heap has grown from %.1f to %.1f MB", mb(before), mb(after))
	}
	if peak > 4*before+64<<20 {
		t.Errorf("the heap had up to %.1f MB, and %.1f MB at the beginning", mb(peak), mb(before))
	}
	verify(t, f.backend, f.Engine.Snapshot())
}

func mb(bytes uint64) float64 { return float64(bytes) / (1 << 20) }
