package winkernel_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"os"
	"slices"
	"testing"
	"time"

	v1 "k8s.io/api/core/v1"

	"github.com/go-proxier/proxier/examples/winkernel"
	"github.com/go-proxier/proxier/examples/winkernel/fakehns"
	"github.com/go-proxier/proxier/internal/testing/must"
	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/ruleset/dataplane"
	"github.com/go-proxier/proxier/tracker"
)

// The IDs of the cluster's network and of another one.
const (
	networkID    = "11111111-2222-3333-4444-555555555555"
	otherNetwork = "33333333-2222-3333-4444-555555555555"
)

var nodeIP = netip.MustParseAddr("192.168.0.11")

// cluster is a Backend with Services of its own making, each with a cluster IP.
type cluster struct {
	hns     *fakehns.Service
	config  winkernel.Config
	backend *winkernel.Backend
	old     map[int]*ruleset.Port
}

func newCluster(tb testing.TB) *cluster {
	tb.Helper()
	c := &cluster{hns: fakehns.New(winkernel.Network{ID: networkID, Name: "cluster", Type: winkernel.L2Bridge}, true), old: map[int]*ruleset.Port{}}
	c.config = winkernel.Config{HNS: api(tb, c.hns), Network: "cluster", Node: "win-1", NodeIPs: []netip.Addr{nodeIP}}
	c.restart(tb)
	return c
}

func (c *cluster) restart(tb testing.TB) {
	tb.Helper()
	c.backend = must.Get(winkernel.New(context.Background(), c.config))(tb)
}

func service(n int, endpoints ...string) *ruleset.Port {
	p := &tracker.ServicePort{
		Key:       tracker.Key{Family: tracker.IPv4},
		ClusterIP: netip.AddrFrom4([4]byte{10, 96, byte(n >> 8), byte(n)}), Port: 80,
	}
	p.Key.Protocol = v1.ProtocolTCP
	p.Key.Namespace, p.Key.Name = "ns", fmt.Sprint("svc-", n)
	state := tracker.PortState{Port: p}
	for _, a := range endpoints {
		e := &tracker.Endpoint{Addr: netip.MustParseAddrPort(a), Ready: true, Serving: true, Weight: 1, Node: "other"}
		if e.Addr.Addr().As4()[2] == 1 || e.Addr.Addr() == nodeIP {
			e.Node = "win-1"
		}
		state.Endpoints = append(state.Endpoints, e)
	}
	return ruleset.Compile(state, &ruleset.Node{Info: tracker.NodeInfo{Name: "win-1"}})
}

// delta returns the delta that makes the Services exist, and records them.
func (c *cluster) delta(full bool, services map[int]*ruleset.Port) *ruleset.Delta {
	d := &ruleset.Delta{Full: full, Node: &ruleset.Node{}}
	for n, s := range services {
		ch := ruleset.Change{Old: c.old[n], New: s, Fields: ruleset.FieldAll}
		if s != nil {
			ch.Key, c.old[n] = s.Key, s
		} else {
			ch.Key = ch.Old.Key
			delete(c.old, n)
		}
		d.Changes = append(d.Changes, ch)
	}
	return d
}

func (c *cluster) apply(tb testing.TB, full bool, services map[int]*ruleset.Port) map[fakehns.Call]int {
	tb.Helper()
	c.hns.Calls()
	must.Do(tb, c.backend.Apply(context.Background(), c.delta(full, services)))
	return c.hns.Calls()
}

// drifted checks that the backend sees what was changed behind its back.
func (c *cluster) drifted(t *testing.T) {
	t.Helper()
	var drift *dataplane.DriftError
	if err := c.backend.Check(t.Context()); !errors.As(err, &drift) {
		t.Fatalf("Check: %v", err)
	}
}

// fill programs n Services of two remote endpoints each.
func (c *cluster) fill(tb testing.TB, n int) {
	services := map[int]*ruleset.Port{}
	for i := range n {
		services[i] = service(i, fmt.Sprintf("10.244.2.%d:8080", i%250), fmt.Sprintf("10.245.%d.%d:8080", 10+i/250, i%250))
	}
	c.apply(tb, true, services)
}

// TestChangeCostsTheCallsItNeeds counts the calls for one endpoint, whatever exists.
func TestChangeCostsTheCallsItNeeds(t *testing.T) {
	sizes := []int{1, 100, 1000}
	if *dlls {
		sizes = sizes[:2] // they cost the same calls, and take a minute
	}
	for _, n := range sizes {
		c := newCluster(t)
		c.fill(t, n)
		if got, want := c.apply(t, false, map[int]*ruleset.Port{0: service(0, "10.244.2.0:8080", "10.246.0.1:8080")}),
			(map[fakehns.Call]int{fakehns.CreateEndpoint: 1, fakehns.ModifyLoadBalancer: 1, fakehns.DeleteEndpoint: 1}); !equal(got, want) {
			t.Errorf("with %d Services an endpoint was replaced by %v, want %v", n, got, want)
		}
		if got, want := c.apply(t, false, map[int]*ruleset.Port{0: service(0, "10.244.2.0:8080")}),
			(map[fakehns.Call]int{fakehns.ModifyLoadBalancer: 1, fakehns.DeleteEndpoint: 1}); !equal(got, want) {
			t.Errorf("with %d Services an endpoint was removed by %v, want %v", n, got, want)
		}
	}
}

func equal(a, b map[fakehns.Call]int) bool {
	return fmt.Sprint(a) == fmt.Sprint(b)
}

// TestRestartWithoutChangesWritesNothing restarts the process with the same Services.
func TestRestartWithoutChangesWritesNothing(t *testing.T) {
	c := newCluster(t)
	c.fill(t, 100)
	c.restart(t)
	calls := c.apply(t, true, c.old)
	if delete(calls, fakehns.Read); len(calls) != 0 {
		t.Errorf("a restart wrote %v", calls)
	}
}

// TestLoadBalancerGoesWhileItsOnlyPodHasNoEndpoint keeps no load balancer that holds the port and
// leads nowhere, and makes it once the endpoint is there.
func TestLoadBalancerGoesWhileItsOnlyPodHasNoEndpoint(t *testing.T) {
	c := newCluster(t)
	c.hns.Plug(winkernel.Endpoint{Addrs: []netip.Addr{netip.MustParseAddr("10.244.1.5")}})
	c.apply(t, true, map[int]*ruleset.Port{0: service(0, "10.244.1.5:80")})
	var partial *ruleset.PartialError
	var waiting *winkernel.WaitingError
	err := c.backend.Apply(t.Context(), c.delta(false, map[int]*ruleset.Port{0: service(0, "10.244.1.6:80")}))
	if !errors.As(err, &partial) || !errors.As(err, &waiting) || !slices.Equal(waiting.Addrs, []netip.Addr{netip.MustParseAddr("10.244.1.6")}) {
		t.Fatalf("Apply with a pod without an endpoint: %v", err)
	}
	if lbs, _ := c.hns.LoadBalancers(); len(lbs) != 0 {
		t.Errorf("load balancers are left: %v", lbs)
	}
	must.Do(t, c.backend.Check(t.Context()))
	c.hns.Plug(winkernel.Endpoint{Addrs: []netip.Addr{netip.MustParseAddr("10.244.1.6")}})
	c.drifted(t)
	if err := c.backend.Apply(t.Context(), c.delta(false, nil)); !errors.Is(err, ruleset.ErrNeedFull) {
		t.Errorf("Apply after a drift: %v", err)
	}
	c.apply(t, true, c.old)
	if lbs, _ := c.hns.LoadBalancers(); len(lbs) != 1 {
		t.Errorf("load balancers are %v", lbs)
	}
}

// TestHostNetworkPodIsLeftOutAndReported has a pod at the node's own address, for which no network
// plugin makes an endpoint.
func TestHostNetworkPodIsLeftOutAndReported(t *testing.T) {
	c := newCluster(t)
	var log bytes.Buffer
	var reported []string
	c.config.Log = slog.New(slog.NewTextHandler(&log, nil))
	c.config.Trace = &winkernel.Hooks{LeftOut: func(k tracker.Key, addrs []netip.Addr) {
		reported = append(reported, fmt.Sprint(k.Name, addrs))
	}}
	c.restart(t)
	host := nodeIP.String() + ":80"
	has := func(n int, want ...string) {
		t.Helper()
		_, endpoints, _ := c.hns.Find(winkernel.Frontend{VIP: c.old[n].Spec.ClusterIP, Port: 80, Protocol: v1.ProtocolTCP, Family: tracker.IPv4})
		var got []string
		for _, e := range endpoints {
			got = append(got, e.Addrs[0].String())
		}
		slices.Sort(got)
		if !slices.Equal(got, want) {
			t.Errorf("Service %d has the endpoints %v, want %v", n, got, want)
		}
	}
	c.apply(t, true, map[int]*ruleset.Port{0: service(0, "10.244.2.1:80", host), 1: service(1, host)})
	has(0, "10.244.2.1")
	has(1)
	c.apply(t, false, map[int]*ruleset.Port{0: service(0, "10.244.2.2:80", host)})
	has(0, "10.244.2.2")
	slices.Sort(reported)
	if want := []string{"svc-0[192.168.0.11]", "svc-1[192.168.0.11]"}; !slices.Equal(reported, want) || bytes.Count(log.Bytes(), []byte("host network")) != 2 {
		t.Errorf("reported were %v, want %v; the log:\n%s", reported, want, &log)
	}
	must.Do(t, c.backend.Check(t.Context()))
	c.hns.Plug(winkernel.Endpoint{Addrs: []netip.Addr{nodeIP}})
	c.drifted(t)
	c.apply(t, true, c.old)
	has(0, "10.244.2.2", nodeIP.String())
	has(1, nodeIP.String())
}

// TestCheckFindsForeignChanges changes each kind of object behind the backend's back.
func TestCheckFindsForeignChanges(t *testing.T) {
	lb := func(c *cluster) winkernel.LoadBalancer {
		lbs := must.Get(c.hns.LoadBalancers())(t)
		return lbs[0]
	}
	for what, change := range map[string]func(*cluster) error{
		"load balancer deleted": func(c *cluster) error { return c.hns.DeleteLoadBalancer(lb(c).ID) },
		"load balancer changed": func(c *cluster) error {
			l := lb(c)
			l.DSR = true
			_, err := c.hns.ModifyLoadBalancer(l)
			return err
		},
		"load balancer added": func(c *cluster) error {
			l := lb(c)
			l.Frontend.Port = 81
			c.hns.Place(l)
			return nil
		},
		"endpoint deleted": func(c *cluster) error { return c.hns.DeleteEndpoint(lb(c).Endpoints[0]) },
		"network replaced": func(c *cluster) error {
			c.hns.SetNetwork(winkernel.Network{ID: "22222222-2222-3333-4444-555555555555", Name: "cluster", Type: winkernel.L2Bridge})
			return nil
		},
	} {
		t.Run(what, func(t *testing.T) {
			c := newCluster(t)
			c.fill(t, 3)
			must.Do(t, c.backend.Check(t.Context()))
			must.Do(t, change(c))
			c.drifted(t)
			c.apply(t, true, c.old)
			must.Do(t, c.backend.Check(t.Context()))
		})
	}
}

// TestCheckIgnoresOtherObjects makes endpoints and networks that do not concern Services.
func TestCheckIgnoresOtherObjects(t *testing.T) {
	c := newCluster(t)
	c.fill(t, 3)
	other := c.hns.Plug(winkernel.Endpoint{Network: otherNetwork, Addrs: []netip.Addr{netip.MustParseAddr("172.16.0.5")}})
	c.hns.Plug(winkernel.Endpoint{Addrs: []netip.Addr{netip.MustParseAddr("10.244.1.77")}})
	c.hns.Place(winkernel.LoadBalancer{Frontend: winkernel.Frontend{Port: 8080, Protocol: v1.ProtocolTCP, Family: tracker.IPv4}, Endpoints: []string{other}})
	must.Do(t, c.backend.Check(t.Context()))
	c.restart(t)
	c.apply(t, true, nil)
	if lbs, _ := c.hns.LoadBalancers(); len(lbs) != 1 {
		t.Errorf("the load balancer of another network is not the only one left: %v", lbs)
	}
}

// TestStoppedServiceForgetsNothing stops the service during changes.
func TestStoppedServiceForgetsNothing(t *testing.T) {
	c := newCluster(t)
	c.fill(t, 3)
	c.hns.Run(false)
	s := service(1, "10.244.2.9:8080")
	for range 2 {
		err := c.backend.Apply(t.Context(), c.delta(false, map[int]*ruleset.Port{1: s}))
		if err == nil || errors.As(err, new(*ruleset.PartialError)) {
			t.Fatalf("Apply while the service is stopped: %v", err)
		}
	}
	c.hns.Run(true)
	c.apply(t, true, c.old)
	f, err := winkernel.Lookup(t.Context(), c.config, dataplane.Query{Packet: ruleset.Packet{Protocol: v1.ProtocolTCP, To: netip.AddrPortFrom(s.Spec.ClusterIP, 80)}})
	if want := []netip.AddrPort{netip.MustParseAddrPort("10.244.2.9:8080")}; err != nil || !slices.Equal(f.Endpoints, want) {
		t.Errorf("Lookup: %v, %v; want %v", f, err, want)
	}
}

// TestRefusedLoadBalancerLeavesTheOthersInStep has a Service of which the service refuses one load
// balancer, because another program has the port or because of the address. What else the Service
// changes, and another Service, come into effect, and nothing is read again.
func TestRefusedLoadBalancerLeavesTheOthersInStep(t *testing.T) {
	taken, free := netip.MustParseAddr("198.51.100.1"), netip.MustParseAddr("203.0.113.1")
	for _, c := range []struct {
		code winkernel.Code
		want error
	}{{0x803b0013, winkernel.ErrExists}, {0x803b001e, winkernel.ErrInvalidAddr}} {
		t.Run(fmt.Sprint(c.want), func(t *testing.T) {
			cl := newCluster(t)
			refuse := true
			cl.config.HNS = choosy{cl.hns, func(lb winkernel.LoadBalancer) error {
				if refuse && lb.Frontend.VIP == taken {
					return c.code
				}
				return nil
			}}
			cl.restart(t)
			of := func(endpoint string, external ...netip.Addr) *ruleset.Port {
				s := service(0, endpoint)
				p := *s.Spec
				p.ExternalIPs = external
				return ruleset.Compile(tracker.PortState{Port: &p, Endpoints: s.Endpoints}, &ruleset.Node{Info: tracker.NodeInfo{Name: "win-1"}})
			}
			check := func(endpoint string, addrs ...netip.Addr) {
				t.Helper()
				var got []netip.Addr
				lbs, _ := cl.hns.LoadBalancers()
				for _, lb := range lbs {
					got = append(got, lb.Frontend.VIP)
					if _, eps, _ := cl.hns.Find(lb.Frontend); len(eps) != 1 || eps[0].Addrs[0].String() != endpoint {
						t.Errorf("load balancer %v has the endpoints %v, want %v", lb.Frontend, eps, endpoint)
					}
				}
				slices.SortFunc(got, netip.Addr.Compare)
				if !slices.Equal(got, addrs) {
					t.Errorf("load balancers are at %v, want %v", got, addrs)
				}
				if eps, _ := cl.hns.Endpoints(); len(eps) != 1 {
					t.Errorf("endpoints are %v", eps)
				}
			}
			vip, other := of("10.244.2.1:80").Spec.ClusterIP, service(1).Spec.ClusterIP
			cl.apply(t, true, nil)
			fails := func(s *ruleset.Port) {
				t.Helper()
				cl.hns.Calls()
				var partial *ruleset.PartialError
				err := cl.backend.Apply(t.Context(), cl.delta(false, map[int]*ruleset.Port{0: s, 1: service(1, s.Endpoints[0].Addr.String())}))
				if !errors.As(err, &partial) || len(partial.Failed) != 1 || !errors.Is(partial.Failed[s.Key], c.want) {
					t.Errorf("Apply: %v", err)
				}
				if calls := cl.hns.Calls(); calls[fakehns.Read] != 0 {
					t.Errorf("the service was read: %v", calls)
				}
			}
			fails(of("10.244.2.1:80", taken, free))
			check("10.244.2.1", vip, other, free)
			fails(of("10.244.2.2:80", taken, free))
			check("10.244.2.2", vip, other, free)
			fails(of("10.244.2.2:80", taken))
			check("10.244.2.2", vip, other)
			refuse = false
			cl.apply(t, false, map[int]*ruleset.Port{0: of("10.244.2.3:80", taken), 1: nil})
			check("10.244.2.3", vip, taken)
		})
	}
}

// TestUndeletedLoadBalancerKeepsWhatItUses fails the deletion of a load balancer in an overlay, which
// has an endpoint at the address of the load balancer.
func TestUndeletedLoadBalancerKeepsWhatItUses(t *testing.T) {
	for _, full := range []bool{false, true} {
		c := newCluster(t)
		c.hns = fakehns.New(winkernel.Network{ID: networkID, Name: "cluster", Type: winkernel.Overlay}, true)
		c.config.HNS, c.config.HostMAC, c.config.SourceVIP = c.hns, "00-15-5d-00-00-01", netip.MustParseAddr("10.244.1.250")
		c.restart(t)
		c.fill(t, 2)
		c.hns.Before = func(call fakehns.Call) error {
			if call == fakehns.DeleteLoadBalancer {
				return winkernel.Code(0x8007045b)
			}
			return nil
		}
		d := c.delta(full, map[int]*ruleset.Port{1: nil})
		if full {
			d = c.delta(true, map[int]*ruleset.Port{0: c.old[0]})
		}
		if err := c.backend.Apply(t.Context(), d); err == nil {
			t.Error("Apply returned no error")
		}
		if m := c.hns.Mistakes(); len(m) != 0 {
			t.Errorf("full=%v: %v", full, m)
		}
		c.hns.Before = nil
		c.apply(t, true, c.old)
		if eps, _ := c.hns.Endpoints(); len(eps) != 4 { // two pods, a cluster IP, and the source
			t.Errorf("full=%v: endpoints left are %v", full, eps)
		}
	}
}

// TestEndpointStaysWhileALoadBalancerHasIt refuses to change one of two load balancers that have an
// endpoint. The next delta is about the other one alone.
func TestEndpointStaysWhileALoadBalancerHasIt(t *testing.T) {
	c := newCluster(t)
	refuse, first := true, service(0).Spec.ClusterIP
	c.config.HNS = choosy{c.hns, func(lb winkernel.LoadBalancer) error {
		if refuse && lb.ID != "" && lb.Frontend.VIP == first {
			return winkernel.Code(0x803b001e)
		}
		return nil
	}}
	c.restart(t)
	c.apply(t, true, map[int]*ruleset.Port{0: service(0, "10.244.2.1:80"), 1: service(1, "10.244.2.1:80")})
	if err := c.backend.Apply(t.Context(), c.delta(false, map[int]*ruleset.Port{0: service(0, "10.244.2.2:80"), 1: service(1, "10.244.2.2:80")})); !errors.Is(err, winkernel.ErrInvalidAddr) {
		t.Errorf("Apply: %v", err)
	}
	c.apply(t, false, map[int]*ruleset.Port{1: service(1, "10.244.2.3:80")})
	refuse = false
	c.apply(t, false, map[int]*ruleset.Port{0: service(0, "10.244.2.3:80")})
	if eps, _ := c.hns.Endpoints(); len(eps) != 1 || len(c.hns.Mistakes()) != 0 {
		t.Errorf("endpoints are %v; mistakes %v", eps, c.hns.Mistakes())
	}
	refuse = true
	_ = c.backend.Apply(t.Context(), c.delta(false, map[int]*ruleset.Port{0: service(0, "10.244.2.4:80")}))
	refuse = false
	if got, want := c.apply(t, false, c.old), map[fakehns.Call]int{fakehns.ModifyLoadBalancer: 1}; !equal(got, want) {
		t.Errorf("the retry of a refused change took %v, want %v", got, want)
	}
}

// choosy is a service that refuses some load balancers.
type choosy struct {
	*fakehns.Service
	refuse func(winkernel.LoadBalancer) error
}

func (c choosy) CreateLoadBalancer(lb winkernel.LoadBalancer) (winkernel.LoadBalancer, error) {
	if err := c.refuse(lb); err != nil {
		return lb, err
	}
	return c.Service.CreateLoadBalancer(lb)
}

func (c choosy) ModifyLoadBalancer(lb winkernel.LoadBalancer) (winkernel.LoadBalancer, error) {
	if err := c.refuse(lb); err != nil {
		return lb, err
	}
	return c.Service.ModifyLoadBalancer(lb)
}

// TestFailedWriteNamesThePurpose refuses one load balancer after the other of a Service that has
// all kinds of them.
func TestFailedWriteNamesThePurpose(t *testing.T) {
	var got []winkernel.Purpose
	for fails := range 5 {
		c := newCluster(t)
		c.config.ForwardHealthCheckVIP, c.config.RootEndpoint, c.config.HealthzPort = true, "cbr0", 10256
		c.hns.Plug(winkernel.Endpoint{Name: "cbr0", Addrs: []netip.Addr{netip.MustParseAddr("10.244.1.1")}})
		c.config.Trace = &winkernel.Hooks{WriteFailed: func(_ string, lb winkernel.LoadBalancer, err error) {
			if !errors.Is(err, winkernel.ErrInvalidAddr) {
				t.Errorf("the error is %v", err)
			}
			got = append(got, lb.Purpose)
		}}
		c.restart(t)
		c.hns.Before = func(call fakehns.Call) error {
			if call != fakehns.CreateLoadBalancer {
				return nil
			}
			if fails--; fails != -1 {
				return nil
			}
			return winkernel.Code(0x803b001e) // HCN_E_INVALID_IP
		}
		p := *service(0, "10.244.2.1:8080").Spec
		p.NodePort, p.ExternalIPs, p.LoadBalancerIPs = 30000, []netip.Addr{netip.MustParseAddr("198.51.100.1")}, []netip.Addr{netip.MustParseAddr("203.0.113.1")}
		s := ruleset.Compile(tracker.PortState{Port: &p, Endpoints: service(0, "10.244.2.1:8080").Endpoints}, &ruleset.Node{Info: tracker.NodeInfo{Name: "win-1"}})
		if err := c.backend.Apply(t.Context(), c.delta(true, map[int]*ruleset.Port{0: s})); err == nil {
			t.Error("Apply returned no error")
		}
	}
	slices.Sort(got)
	if want := []winkernel.Purpose{winkernel.ClusterIP, winkernel.ExternalIP, winkernel.HealthCheck, winkernel.IngressIP, winkernel.NodePort}; !slices.Equal(got, want) {
		t.Errorf("refused were %v, want %v", got, want)
	}
}

// TestUselessModifyIsNoticed uses a service that accepts changes and does nothing, as HNS 15.4.
func TestUselessModifyIsNoticed(t *testing.T) {
	c := newCluster(t)
	c.config.HNS = deaf{c.hns}
	c.restart(t)
	c.apply(t, true, map[int]*ruleset.Port{0: service(0, "10.244.2.1:80")})
	c.apply(t, false, map[int]*ruleset.Port{0: service(0, "10.244.2.2:80")})
	_, eps, _ := c.hns.Find(winkernel.Frontend{VIP: c.old[0].Spec.ClusterIP, Port: 80, Protocol: v1.ProtocolTCP, Family: tracker.IPv4})
	if len(eps) != 1 || eps[0].Addrs[0] != netip.MustParseAddr("10.244.2.2") {
		t.Errorf("the load balancer has the endpoints %v", eps)
	}
}

type deaf struct{ *fakehns.Service }

func (d deaf) ModifyLoadBalancer(lb winkernel.LoadBalancer) (winkernel.LoadBalancer, error) {
	lbs, err := d.LoadBalancers()
	return lbs[slices.IndexFunc(lbs, func(l winkernel.LoadBalancer) bool { return l.ID == lb.ID })], err
}

// TestCleanupLeavesWhatOthersMade deletes load balancers and remote endpoints only.
func TestCleanupLeavesWhatOthersMade(t *testing.T) {
	c := newCluster(t)
	c.fill(t, 3)
	c.hns.Plug(winkernel.Endpoint{Addrs: []netip.Addr{netip.MustParseAddr("10.244.1.77")}})
	c.hns.Plug(winkernel.Endpoint{Addrs: []netip.Addr{netip.MustParseAddr("10.244.7.7")}, Remote: true, MAC: "00-15-5d-00-00-07"})
	must.Do(t, winkernel.Cleanup(t.Context(), c.config))
	lbs, _ := c.hns.LoadBalancers()
	endpoints, _ := c.hns.Endpoints()
	if len(lbs) != 0 || len(endpoints) != 2 || len(c.hns.Mistakes()) != 0 {
		t.Errorf("left are %v and %v; mistakes %v", lbs, endpoints, c.hns.Mistakes())
	}
	if _, err := winkernel.Lookup(t.Context(), c.config, dataplane.Query{}); !errors.Is(err, dataplane.ErrNoRules) {
		t.Errorf("Lookup after Cleanup: %v", err)
	}
}

// TestInvalidConfigIsRefused changes one field at a time.
func TestInvalidConfigIsRefused(t *testing.T) {
	for what, change := range map[string]func(*winkernel.Config){
		"no HNS":      func(c *winkernel.Config) { c.HNS = nil },
		"no network":  func(c *winkernel.Config) { c.Network = "" },
		"no node":     func(c *winkernel.Config) { c.Node = "" },
		"no node IP":  func(c *winkernel.Config) { c.NodeIPs = nil },
		"two of IPv4": func(c *winkernel.Config) { c.NodeIPs = []netip.Addr{nodeIP, nodeIP.Next()} },
		"no root":     func(c *winkernel.Config) { c.ForwardHealthCheckVIP = true },
		"mapped IPv4": func(c *winkernel.Config) { c.NodeIPs = []netip.Addr{netip.AddrFrom16(nodeIP.As16())} },
		"overlay": func(c *winkernel.Config) {
			c.HNS = fakehns.New(winkernel.Network{ID: "n", Name: "cluster", Type: winkernel.Overlay}, true)
		},
		"transparent": func(c *winkernel.Config) {
			c.HNS = fakehns.New(winkernel.Network{ID: "n", Name: "cluster", Type: "Transparent"}, true)
		},
	} {
		c := newCluster(t).config
		change(&c)
		if err := winkernel.Probe(t.Context(), c); !errors.Is(err, ruleset.ErrConfig) {
			t.Errorf("%s: %v", what, err)
		}
	}
	c := newCluster(t)
	c.config.Network = "other"
	if err := winkernel.Probe(t.Context(), c.config); !errors.Is(err, winkernel.ErrNotFound) {
		t.Errorf("network that does not exist: %v", err)
	}
	if *dlls {
		return // hnslib knows what the version of the service supports
	}
	c = newCluster(t)
	c.config.DSR, c.hns.Has.DSR = true, false
	if err := winkernel.Probe(t.Context(), c.config); !errors.Is(err, dataplane.ErrUnsupported) {
		t.Errorf("DSR without support: %v", err)
	}
}

// TestClosedBackendReturnsErrClosed calls every method after Close.
func TestClosedBackendReturnsErrClosed(t *testing.T) {
	c := newCluster(t)
	watch := make(chan error, 1)
	go func() { watch <- c.backend.Watch(context.Background(), time.Hour, func(error) {}) }()
	c.backend.Close()
	for what, err := range map[string]error{
		"Apply": c.backend.Apply(t.Context(), &ruleset.Delta{Full: true, Node: &ruleset.Node{}}),
		"Check": c.backend.Check(t.Context()),
		"Watch": <-watch,
	} {
		if !errors.Is(err, os.ErrClosed) {
			t.Errorf("%s: %v", what, err)
		}
	}
}
