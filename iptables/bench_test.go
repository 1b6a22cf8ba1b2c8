//go:build linux

package iptables

import (
	"context"
	"fmt"
	"net"
	"net/netip"
	"testing"

	"golang.org/x/sys/unix"
	v1 "k8s.io/api/core/v1"

	"github.com/go-proxier/proxier/internal/iptext"
	"github.com/go-proxier/proxier/internal/testing/backendtest"
	"github.com/go-proxier/proxier/internal/testing/must"
	"github.com/go-proxier/proxier/internal/testing/netlab"
	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/tracker"
)

// sizes lists the clusters of the benchmarks.
var sizes = []struct{ services, endpoints int }{{1000, 10}, {3000, 10}, {5000, 10}, {10000, 10}}

// flatMost is the most Services of the benchmarks with one long chain. nf_tables takes
// minutes for more, during which the machine does not respond.
var flatMost = map[Flavor]int{NFT: 1000, Legacy: 10000}

func benchmark(b *testing.B, f func(b *testing.B, r *rig, services, endpoints int)) {
	for _, flavor := range []Flavor{NFT, Legacy} {
		for _, size := range sizes {
			b.Run(fmt.Sprintf("flavor=%s/services=%d/endpoints=%d", flavor, size.services, size.endpoints), func(b *testing.B) {
				needFlavor(b, flavor)
				r := newRig(b, onLinux(flavor), onlyIPv4)
				for i := range size.services {
					r.tracker.SetService(benchService(i))
					r.tracker.SetSlice(slice(i, tracker.IPv4, benchEndpoints(i, size.endpoints)...))
				}
				b.ReportAllocs()
				f(b, r, size.services, size.endpoints)
			})
		}
	}
}

func benchService(i int) *v1.Service {
	return svc(i, func(s *v1.Service) {
		s.Spec.ClusterIPs, s.Spec.IPFamilies = s.Spec.ClusterIPs[:1], s.Spec.IPFamilies[:1]
	})
}

func benchEndpoints(i, n int) []int {
	out := make([]int, n)
	for j := range out {
		out[j] = (i*n + j) & 0xffff
	}
	return out
}

// clear removes everything, for the next cold start.
func (r *rig) clear() {
	r.Helper()
	must.Do(r, Cleanup(context.Background(), r.config))
}

func (r *rig) fam() *family { return r.backend.families[0] }

// apply applies inputs. It skips the benchmark if one is too large without privileges.
func (r *rig) apply(inputs ...*input) {
	r.Helper()
	out := r.fam().write(context.Background(), inputs...)
	if out.result == tooLarge {
		r.Skip("needs a larger socket buffer: as root, PROXIER_NETLAB_INSIDE=1 unshare -n go test ...")
	}
	if out.err != nil {
		r.Fatal(out.err)
	}
}

// BenchmarkColdStart measures a full delta to empty tables: reading them, rendering and
// writing.
func BenchmarkColdStart(b *testing.B) {
	benchmark(b, func(b *testing.B, r *rig, services, endpoints int) {
		for b.Loop() {
			r.sync()
			b.StopTimer()
			r.clear()
			r.start()
			b.StartTimer()
		}
	})
}

func (m *model) flatServices() chain {
	c := chain{table: nat, name: chainServices, rank: rankTop}
	m.trees[toServices].first.walk(func(n *node) {
		for _, d := range n.rules {
			c.rules = append(c.rules, d.rule)
		}
	})
	return c
}

// BenchmarkOneEndpoint measures the replacement of one endpoint, from the EndpointSlice to
// the kernel. The floor restores one small chain in the same tables. The rival restores
// the Service's chains and one long KUBE-SERVICES.
func BenchmarkOneEndpoint(b *testing.B) {
	benchmark(b, func(b *testing.B, r *rig, services, endpoints int) {
		r.sync()
		last := services - 1
		n := 0
		change := func() {
			eps := benchEndpoints(last, endpoints)
			n++
			eps[len(eps)-1] = 60000 + n%5000
			r.tracker.SetSlice(slice(last, tracker.IPv4, eps...))
		}
		b.Run("proxier", func(b *testing.B) {
			for b.Loop() {
				change()
				r.sync()
			}
		})
		b.Run("floor", func(b *testing.B) {
			for b.Loop() {
				n++
				r.apply(newInput(nat, []chain{{nat, "KUBE-FLOOR", []string{
					iptext.Source(netip.MustParsePrefix("10.0.0.1/32")) + " " + iptext.Jump(chainMarkMasq),
					fmt.Sprintf("-p tcp -j DNAT --to-destination 10.0.0.1:%d", n%60000+1),
				}, 0}}, nil, nil, nil, nil))
			}
		})
		b.Run("flat", func(b *testing.B) {
			r := &rig{TB: b, backend: r.backend, cursor: r.cursor, tracker: r.tracker, flavor: r.flavor}
			if services > 3*flatMost[r.flavor.Flavor] {
				b.Skip("takes too long")
			}
			m := r.fam().model
			long := m.flatServices()
			for b.Loop() {
				change()
				r.sync() // the Service's own chains
				r.apply(newInput(nat, []chain{{nat, "KUBE-FLAT", long.rules, 0}}, nil, nil, nil, nil))
			}
			r.apply(newInput(nat, nil, nil, []string{"KUBE-FLAT"}, []string{"KUBE-FLAT"}, nil))
		})
	})
}

// BenchmarkConnections measures connections a second through the last Service of many, by a
// tree of chains and by one long chain, and to an endpoint directly.
func BenchmarkConnections(b *testing.B) {
	for _, flavor := range []Flavor{NFT, Legacy} {
		for _, services := range []int{0, 10, 1000, 10000} {
			for _, layout := range []string{"tree", "flat"} {
				if services == 0 && layout == "flat" {
					continue
				}
				b.Run(fmt.Sprintf("flavor=%s/services=%d/%s", flavor, services, layout), func(b *testing.B) {
					needFlavor(b, flavor)
					r := newRig(b, onLinux(flavor), onlyIPv4)
					benchConnections(b, r, services, layout == "flat")
				})
			}
		}
	}
}

func benchConnections(b *testing.B, r *rig, services int, flat bool) {
	own := netip.MustParseAddr("192.168.9.1")
	for _, err := range []error{
		r.host().AddAddr("lo", netip.PrefixFrom(own, 32)),
		r.host().AddRoute(netip.MustParsePrefix("10.96.0.0/16"), netip.Addr{}, "lo"),
	} {
		if err != nil {
			b.Fatal(err)
		}
	}
	r.host().ServeTCP(b, own.String()+":8080", func(net.Conn) {})
	target := unix.SockaddrInet4{Port: 8080, Addr: own.As4()}
	for i := range services {
		r.tracker.SetService(benchService(i))
		es := slice(i, tracker.IPv4, 1)
		es.Endpoints[0].Addresses = []string{own.String()}
		r.tracker.SetSlice(es)
	}
	if services != 0 {
		r.sync()
		must.Do(b, r.host().Sysctl("net/netfilter/nf_conntrack_tcp_timeout_close", "1"))
		target = unix.SockaddrInet4{Port: 80, Addr: netip.MustParseAddr(svc(services - 1).Spec.ClusterIP).As4()}
		if flat {
			r.apply(newInput(nat, []chain{r.fam().model.flatServices()}, nil, nil, nil, nil))
		}
	}
	err := r.host().Do(func() error {
		for b.Loop() {
			fd, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
			if err != nil {
				return err
			}
			if err := unix.Connect(fd, &target); err != nil {
				return err
			}
			// With TIME_WAIT the client would run out of ports.
			if err := unix.SetsockoptLinger(fd, unix.SOL_SOCKET, unix.SO_LINGER, &unix.Linger{Onoff: 1}); err != nil {
				return err
			}
			unix.Close(fd)
		}
		return nil
	})
	if err != nil {
		b.Fatal(err)
	}
	b.ReportMetric(float64(b.N)/b.Elapsed().Seconds(), "connections/s")
}

// BenchmarkChangeBesideAttacker: see [backendtest.ChangeBesideAttacker].
func BenchmarkChangeBesideAttacker(b *testing.B) {
	for _, flavor := range []Flavor{NFT, Legacy} {
		b.Run("flavor="+string(flavor), func(b *testing.B) {
			needFlavor(b, flavor)
			backendtest.ChangeBesideAttacker(b, func(tb testing.TB) ruleset.Backend {
				c := testConfig(tb, flavor)
				c.NetNS, c.Families = netlab.NewHost(tb).File(), []tracker.Family{tracker.IPv4}
				backend := must.Get(New(tb.Context(), c))(tb)
				tb.Cleanup(func() { backend.Close() })
				return backend
			})
		})
	}
}
