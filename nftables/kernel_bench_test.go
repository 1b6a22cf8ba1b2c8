//go:build linux

package nftables

import (
	"encoding/binary"
	"fmt"
	"net/netip"
	"runtime"
	"strings"
	"testing"
	"time"

	v1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"

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

// BenchmarkExpensiveElements measures the kernel memory of Services whose elements are large, for each
// element that the budget counts.
func BenchmarkExpensiveElements(b *testing.B) {
	long := func(letter string) string { return strings.Repeat(letter, 63) }
	for _, c := range []struct {
		name            string
		services, ports int
		edit            func(i int, s *v1.Service)
	}{
		{"sources", 50, 5, func(_ int, s *v1.Service) {
			for n := range 1000 {
				s.Spec.LoadBalancerSourceRanges = append(s.Spec.LoadBalancerSourceRanges, fmt.Sprintf("2001:db8:%x::/48", n))
			}
		}},
		{"local-frontends", 25, 1000, func(i int, s *v1.Service) {
			s.Spec.ExternalTrafficPolicy = v1.ServiceExternalTrafficPolicyLocal
			for n := range 8 {
				s.Spec.ExternalIPs = append(s.Spec.ExternalIPs, fmt.Sprintf("2001:db8:2:%x::%x", n, i+1))
			}
		}},
	} {
		b.Run(c.name, func(b *testing.B) {
			h := netlab.NewHost(b)
			memory, cost := 0.0, 0
			for b.Loop() {
				b.StopTimer()
				clean(b, h)
				before := kernelMemory()
				p := newPipeline(b, h.File())
				p.backend.Close()
				p.cursor.Detach()
				var err error
				if p.backend, err = New(b.Context(), Config{NetNS: h.File(), Families: []tracker.Family{tracker.IPv6}}); err != nil {
					b.Fatal(err)
				}
				p.cursor = p.engine.Attach("nftables", p.backend)
				w := &world{}
				for i := range c.services {
					s, slice := benchService(i), benchSlice(i, 0)
					s.Namespace, s.Name = long("n"), fmt.Sprintf("%s%d", long("s"), i)
					s.Spec.Type = v1.ServiceTypeLoadBalancer
					s.Spec.IPFamilies = []v1.IPFamily{v1.IPv6Protocol}
					s.Spec.ClusterIP = fmt.Sprintf("fd00:96::%x", i+1)
					s.Spec.ClusterIPs = []string{s.Spec.ClusterIP}
					s.Status.LoadBalancer.Ingress = []v1.LoadBalancerIngress{{IP: fmt.Sprintf("2001:db8:1::%x", i+1)}}
					s.Spec.Ports, slice.Ports = nil, nil
					for n := range int32(c.ports) {
						name, port, proto := fmt.Sprint("p", n), n+1, v1.ProtocolTCP
						s.Spec.Ports = append(s.Spec.Ports, v1.ServicePort{Name: name, Port: port, Protocol: proto})
						slice.Ports = append(slice.Ports, discovery.EndpointPort{Name: &name, Port: &port, Protocol: &proto})
					}
					slice.Namespace, slice.Labels = s.Namespace, map[string]string{discovery.LabelServiceName: s.Name}
					slice.AddressType = discovery.AddressTypeIPv6
					node := "node-2"
					slice.Endpoints = []discovery.Endpoint{{Addresses: []string{"fd00:10::1"}, NodeName: &node}}
					c.edit(i, s)
					w.services, w.slices = append(w.services, s), append(w.slices, slice)
				}
				p.take(w)
				b.StartTimer()
				p.sync(b)
				b.StopTimer()
				memory, cost = kernelMemory()-before, 0
				for _, s := range p.engine.Snapshot().Ports {
					cost += s.Cost()
				}
				p.backend.Close()
				b.StartTimer()
			}
			clean(b, h)
			b.ReportMetric(float64(cost), "cost")
			b.ReportMetric(memory/float64(cost), "kernel-B/element")
		})
	}
}

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
