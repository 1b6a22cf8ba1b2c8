//go:build linux

package nftables

import (
	"context"
	"fmt"
	"net/netip"
	"os"
	"runtime"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	v1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/go-proxier/proxier/internal/nft"
	"github.com/go-proxier/proxier/internal/testing/must"
	"github.com/go-proxier/proxier/internal/testing/netlab"
	"github.com/go-proxier/proxier/nftables/internal/kernel"
	"github.com/go-proxier/proxier/nftables/internal/layout"
	"github.com/go-proxier/proxier/nftables/internal/model"
	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/tracker"
)

// sizes lists the worlds of benchmarks.
var sizes = []worldSize{{1000, 10}, {10000, 10}, {45000, 1}, {5000, 50}}

type worldSize struct{ services, endpoints int }

func (s worldSize) String() string {
	return fmt.Sprintf("services=%d/endpoints=%d", s.services, s.endpoints)
}

// world is API objects in memory, as informers would hold them.
type world struct {
	services []*v1.Service
	slices   []*discovery.EndpointSlice
}

func newWorld(size worldSize) *world {
	w := &world{}
	for i := range size.services {
		w.services = append(w.services, benchService(i))
		w.slices = append(w.slices, benchSlice(i, size.endpoints))
	}
	return w
}

func benchService(i int) *v1.Service {
	ip := netip.AddrFrom4([4]byte{10, 96 + byte(i>>16), byte(i >> 8), byte(i)}).String()
	return &v1.Service{
		ObjectMeta: metav1.ObjectMeta{Namespace: "bench", Name: "service-" + strconv.Itoa(i)},
		Spec: v1.ServiceSpec{
			Type: v1.ServiceTypeClusterIP, ClusterIP: ip, ClusterIPs: []string{ip},
			IPFamilies: []v1.IPFamily{v1.IPv4Protocol},
			Ports:      []v1.ServicePort{{Name: "http", Protocol: v1.ProtocolTCP, Port: 80}},
		},
	}
}

func benchSlice(i, endpoints int) *discovery.EndpointSlice {
	name, port, proto := "http", int32(8080), v1.ProtocolTCP
	es := &discovery.EndpointSlice{
		ObjectMeta: metav1.ObjectMeta{
			Namespace: "bench", Name: "service-" + strconv.Itoa(i) + "-abcde",
			Labels: map[string]string{discovery.LabelServiceName: "service-" + strconv.Itoa(i)},
		},
		AddressType: discovery.AddressTypeIPv4,
		Ports:       []discovery.EndpointPort{{Name: &name, Port: &port, Protocol: &proto}},
	}
	for e := range endpoints {
		n := i*endpoints + e
		node := "node-" + strconv.Itoa(n%1000)
		es.Endpoints = append(es.Endpoints, discovery.Endpoint{
			Addresses: []string{netip.AddrFrom4([4]byte{10, 128 + byte(n>>16), byte(n >> 8), byte(n)}).String()},
			NodeName:  &node,
		})
	}
	return es
}

// pipeline leads from API objects to the kernel.
type pipeline struct {
	tracker *tracker.Tracker
	engine  *ruleset.Engine
	cursor  *ruleset.Cursor
	backend *Backend
}

func newPipeline(tb testing.TB, netns *os.File, hook ...func(*v1.Service, *v1.ServicePort, *tracker.ServicePort) error) *pipeline {
	tb.Helper()
	p := &pipeline{}
	p.backend = must.Get(New(context.Background(), Config{NetNS: netns, Families: []tracker.Family{tracker.IPv4}}))(tb)
	c := tracker.Config{Node: tracker.NodeInfo{Name: "node-1"}}
	if len(hook) != 0 {
		c.OnService = hook[0]
	}
	p.tracker = must.Get(tracker.New(c))(tb)
	p.engine = must.Get(ruleset.NewEngine(ruleset.Config{Source: p.tracker}))(tb)
	p.cursor = p.engine.Attach("nftables", p.backend)
	return p
}

// take passes the world's objects to the tracker.
func (p *pipeline) take(w *world) {
	for _, s := range w.services {
		p.tracker.SetService(s)
	}
	for _, s := range w.slices {
		p.tracker.SetSlice(s)
	}
	p.tracker.MarkSynced(tracker.KindServices, tracker.KindSlices, tracker.KindNodes)
}

func (p *pipeline) sync(tb testing.TB) {
	tb.Helper()
	must.Do(tb, p.cursor.Sync(context.Background()))
}

// elements returns the number of programmed elements.
func (p *pipeline) elements() int {
	n := 0
	for _, t := range p.backend.tables.List {
		for s := range layout.SetCount {
			n += t.Room.Count(s)
		}
	}
	return n
}

// residentPeak returns the process's largest resident memory since resetPeak, in bytes
// (proc(5), VmHWM).
func residentPeak() float64 {
	data, _ := os.ReadFile("/proc/self/status")
	for line := range strings.Lines(string(data)) {
		if f := strings.Fields(line); len(f) == 3 && f[0] == "VmHWM:" {
			n, _ := strconv.Atoi(f[1])
			return float64(n) * 1024
		}
	}
	return 0
}

func resetPeak() { _ = os.WriteFile("/proc/self/clear_refs", []byte("5"), 0) }

// BenchmarkColdStart measures the start of a node: from objects in memory to rules in an
// empty kernel.
func BenchmarkColdStart(b *testing.B) {
	for _, size := range sizes {
		b.Run(size.String(), func(b *testing.B) {
			w := newWorld(size)
			h := netlab.NewHost(b)
			p := newPipeline(b, h.File())
			p.take(w)
			p.sync(b)
			count := p.elements()
			p.backend.Close()
			p = nil
			b.ReportAllocs()
			var floor time.Duration
			n := 0
			for b.Loop() {
				b.StopTimer()
				clean(b, h)
				floor += floorOf(b, h, count)
				n++
				runtime.GC()
				resetPeak()
				b.StartTimer()
				p := newPipeline(b, h.File())
				p.take(w)
				p.sync(b)
				b.StopTimer()
				p.backend.Close()
				b.StartTimer()
			}
			b.ReportMetric(residentPeak()/1e6, "MB-resident")
			b.ReportMetric(float64(count), "elements")
			ratio(b, floor, n)
		})
	}
}

func ratio(b *testing.B, floor time.Duration, n int) {
	per := float64(floor) / float64(n)
	b.ReportMetric(per, "floor-ns/op")
	b.ReportMetric(float64(b.Elapsed())/float64(b.N)/per, "x-floor")
}

func clean(b *testing.B, h *netlab.Host) {
	must.Do(b, Cleanup(context.Background(), Config{NetNS: h.File()}))
}

// floorOf returns the time that the kernel takes for a bare set of count elements, in
// netlink batches of 10,000.
func floorOf(b *testing.B, h *netlab.Host, count int) time.Duration {
	conn := must.Get(kernel.Dial(h.File(), kernel.SendBuffer))(b)
	defer conn.Close()
	var batch nft.Batch
	makeFloor(b, conn, model.SizeFor(count))
	runtime.GC()
	start := time.Now()
	var e nft.Elements
	for i := 0; i < count; {
		batch.Reset()
		e.Reset()
		for ; i < count && e.Count() < model.Chunk && e.Size() < conn.Limit()/2; i++ {
			key := layout.Octets{}.Word(uint32(i)).Word(0)
			data := layout.Octets{}.Addr(netip.AddrFrom4([4]byte{10, byte(i >> 16), byte(i >> 8), byte(i)})).Port(80)
			e.Add(key.Bytes(), data.Bytes(), "")
		}
		batch.Elements(unix.NFT_MSG_NEWSETELEM, unix.NLM_F_CREATE, unix.NFPROTO_IPV4, "floor", layout.Endpoints.Name(), &e)
		must.Do(b, conn.Commit(&batch))
	}
	took := time.Since(start)
	must.Do(b, Cleanup(context.Background(), Config{NetNS: h.File(), Table: "floor", Families: []tracker.Family{tracker.IPv4}}))
	return took
}

// makeFloor creates the table "floor" with one map.
func makeFloor(b *testing.B, conn *kernel.Conn, size int) {
	b.Helper()
	w := kernel.NewWriter("floor")
	w.Add(&model.Tx{Objects: []model.Object{
		{Kind: model.CreateTable, Family: tracker.IPv4}, {Kind: model.NewSet, Family: tracker.IPv4, Set: layout.Endpoints, Size: size},
	}})
	must.Do(b, w.Commit(conn))
}

// BenchmarkOneEndpointChanged measures the replacement of one endpoint, from the
// EndpointSlice to the kernel's commit.
func BenchmarkOneEndpointChanged(b *testing.B) {
	for _, size := range sizes {
		b.Run(size.String(), func(b *testing.B) {
			h := netlab.NewHost(b)
			p := newPipeline(b, h.File())
			defer p.backend.Close()
			p.take(newWorld(size))
			p.sync(b)
			i := size.services / 2
			variants := [2]*discovery.EndpointSlice{benchSlice(i, size.endpoints), benchSlice(i, size.endpoints)}
			variants[1].Endpoints[size.endpoints/2].Addresses[0] = "10.250.0.1"
			p.tracker.SetSlice(variants[1])
			p.sync(b)
			runtime.GC()
			floor, replacing := floorTransaction(b, h, false), floorTransaction(b, h, true)
			b.ReportAllocs()
			n := 0
			for b.Loop() {
				if !p.tracker.SetSlice(variants[n%2]) {
					b.Fatal("no change")
				}
				p.sync(b)
				n++
			}
			ratio(b, floor, 1)
			b.ReportMetric(float64(b.Elapsed())/float64(b.N)/float64(replacing), "x-replacing-floor")
		})
	}
}

// floorTransaction returns the mean time that the kernel takes for a bare transaction that adds
// one element, or replaces it, as the change of an endpoint must: by its deletion and its addition.
func floorTransaction(b *testing.B, h *netlab.Host, replace bool) time.Duration {
	conn := must.Get(kernel.Dial(h.File(), kernel.SendBuffer))(b)
	defer conn.Close()
	makeFloor(b, conn, 1<<16)
	var batch nft.Batch
	var e, old nft.Elements
	const rounds = 20000
	start := time.Now()
	for i := range rounds {
		batch.Reset()
		e.Reset()
		key := layout.Octets{}.Word(uint32(i)).Word(0)
		if replace {
			key = layout.Octets{}.Word(0).Word(0)
			if i > 0 {
				old.Reset()
				old.Add(key.Bytes(), nil, "")
				batch.Elements(unix.NFT_MSG_DELSETELEM, 0, unix.NFPROTO_IPV4, "floor", layout.Endpoints.Name(), &old)
			}
		}
		data := layout.Octets{}.Addr(netip.AddrFrom4([4]byte{10, 0, 0, 1})).Port(80)
		e.Add(key.Bytes(), data.Bytes(), "")
		batch.Elements(unix.NFT_MSG_NEWSETELEM, unix.NLM_F_CREATE, unix.NFPROTO_IPV4, "floor", layout.Endpoints.Name(), &e)
		must.Do(b, conn.Commit(&batch))
	}
	took := time.Since(start) / rounds
	must.Do(b, Cleanup(context.Background(), Config{NetNS: h.File(), Table: "floor", Families: []tracker.Family{tracker.IPv4}}))
	return took
}

// BenchmarkServiceAddedAndRemoved adds one Service with its endpoints and removes it, in
// two operations.
func BenchmarkServiceAddedAndRemoved(b *testing.B) {
	for _, size := range sizes {
		b.Run(size.String(), func(b *testing.B) {
			h := netlab.NewHost(b)
			p := newPipeline(b, h.File())
			defer p.backend.Close()
			p.take(newWorld(size))
			p.sync(b)
			svc, slice := benchService(1<<17), benchSlice(size.services, size.endpoints)
			slice.Name, slice.Labels[discovery.LabelServiceName] = svc.Name, svc.Name
			name := types.NamespacedName{Namespace: svc.Namespace, Name: svc.Name}
			floor := floorTransaction(b, h, false)
			b.ReportAllocs()
			for b.Loop() {
				p.tracker.SetService(svc)
				p.tracker.SetSlice(slice)
				p.sync(b)
				p.tracker.DeleteService(name)
				p.tracker.DeleteSlice(name)
				p.sync(b)
			}
			ratio(b, floor, 1)
		})
	}
}

// BenchmarkHeap reports the Go heap that the pipeline holds for each endpoint, without the
// caller's objects.
func BenchmarkHeap(b *testing.B) {
	for _, size := range sizes {
		b.Run(size.String(), func(b *testing.B) {
			w := newWorld(size)
			h := netlab.NewHost(b)
			var held float64
			for b.Loop() {
				before := liveHeap()
				p := newPipeline(b, h.File())
				p.take(w)
				p.sync(b)
				held = liveHeap() - before
				p.backend.Close()
				runtime.KeepAlive(p)
			}
			runtime.KeepAlive(w)
			b.ReportMetric(held/float64(size.services*size.endpoints), "B/endpoint")
		})
	}
}

func liveHeap() float64 {
	runtime.GC()
	runtime.GC()
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return float64(m.HeapAlloc)
}
