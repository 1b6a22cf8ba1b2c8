//go:build linux

package nftables

import (
	"encoding/binary"
	"fmt"
	"net/netip"
	"runtime"
	"strings"
	"testing"

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
				p.backend = must.Get(New(b.Context(), Config{NetNS: h.File(), Families: []tracker.Family{tracker.IPv6}}))(b)
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
