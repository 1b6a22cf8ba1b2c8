//go:build linux

package iptables

import (
	"context"
	"fmt"
	"io"
	"math"
	"net"
	"net/netip"
	"sync"
	"testing"
	"time"

	discovery "k8s.io/api/discovery/v1"

	"github.com/go-proxier/proxier/internal/testing/must"
	"github.com/go-proxier/proxier/internal/testing/testtime"
	"github.com/go-proxier/proxier/tracker"
)

// acceptor serves at many addresses. It answers each connection with the address.
func acceptor(t *testing.T, r *rig, addrs []netip.AddrPort) {
	t.Helper()
	for _, a := range addrs {
		r.host().ServeTCP(t, a.String(), func(c net.Conn) { fmt.Fprint(c, a) })
	}
}

// silence bounds the wait for an answer that must not come.
const silence = time.Second

// reach makes a connection within the time and returns the server's answer.
func reach(r *rig, from, to string, wait time.Duration) (string, error) {
	ctx, cancel := context.WithTimeout(context.Background(), wait)
	defer cancel()
	c, err := r.host().Dial(ctx, "tcp", from, to)
	if err != nil {
		return "", err
	}
	defer c.Close()
	c.SetDeadline(time.Now().Add(wait))
	b, err := io.ReadAll(c)
	return string(b), err
}

// TestGroupedEndpointsGetEqualShares sends connections through groups of endpoints. Each
// endpoint must get about its share, and affinity must hold.
func TestGroupedEndpointsGetEqualShares(t *testing.T) {
	t.Parallel()
	flavors(t, func(t *testing.T, flavor Flavor) {
		t.Parallel()
		r := newRig(t, onLinux(flavor))
		const n, each = 2 * flatPool, 30
		var endpoints []netip.AddrPort
		es := slice(0, tracker.IPv4)
		for i := range n {
			a := netip.AddrFrom4([4]byte{192, 168, 9, byte(i + 1)})
			must.Do(t, r.host().AddAddr("lo", netip.PrefixFrom(a, 32)))
			endpoints = append(endpoints, netip.AddrPortFrom(a, 8080))
			es.Endpoints = append(es.Endpoints, discovery.Endpoint{Addresses: []string{a.String()}})
		}
		acceptor(t, r, endpoints)
		// Without a route to the cluster IP, the node's own packets are not sent.
		must.Do(t, r.host().AddRoute(netip.MustParsePrefix("10.96.0.0/16"), netip.Addr{}, "lo"))
		r.tracker.SetService(svc(1))
		r.tracker.SetSlice(es)
		es = es.DeepCopy()
		es.Name, es.Labels[discovery.LabelServiceName] = "sticky", "svc-1"
		r.tracker.SetService(svc(0, affinity(100)))
		r.tracker.SetSlice(es)
		r.sync()
		r.verify()

		var mu sync.Mutex
		got := map[string]int{}
		var wait sync.WaitGroup
		for range 8 {
			wait.Go(func() {
				for range n * each / 8 {
					server, err := reach(r, "", "10.96.0.1:80", testtime.Timeout)
					if err != nil {
						t.Error(err)
						return
					}
					mu.Lock()
					got[server]++
					mu.Unlock()
				}
			})
		}
		wait.Wait()
		// Chi-squared with n-1 degrees of freedom exceeds this once in 10^9 times.
		chi, limit := 0.0, float64(n-1)+6.5*math.Sqrt(2*float64(n-1))+15
		for _, ep := range endpoints {
			d := float64(got[ep.String()] - each)
			chi += d * d / each
		}
		if chi > limit {
			t.Errorf("not uniform: chi-squared is %.1f, more than %.1f: %v", chi, limit, got)
		}
		first := must.Get(reach(r, "", "10.96.0.0:80", testtime.Timeout))(t)
		for range 20 {
			if server, err := reach(r, "", "10.96.0.0:80", testtime.Timeout); err != nil || server != first {
				t.Fatalf("affinity: %q, then %q, error %v", first, server, err)
			}
		}
	})
}

// TestLoopbackAnswersOnlyAsConfigured connects to a NodePort at the loopback address, and to
// the loopback range from another address, which must fail.
func TestLoopbackAnswersOnlyAsConfigured(t *testing.T) {
	t.Parallel()
	flavors(t, func(t *testing.T, flavor Flavor) {
		t.Parallel()
		for _, on := range []bool{true, false} {
			r := newRig(t, onLinux(flavor), func(c *Config) { c.LocalhostNodePorts = on })
			a := netip.MustParseAddrPort("192.168.9.1:8080")
			must.Do(t, r.host().AddAddr("lo", netip.PrefixFrom(a.Addr(), 32)))
			acceptor(t, r, []netip.AddrPort{a})
			l := must.Get(r.host().Listen("tcp", "127.0.0.1:9090"))(t)
			defer l.Close()
			es := slice(0, tracker.IPv4)
			es.Endpoints = []discovery.Endpoint{{Addresses: []string{a.Addr().String()}}}
			r.tracker.SetService(svc(0, nodePort(30000)))
			r.tracker.SetSlice(es)
			r.sync()
			if server, err := reach(r, "", "192.168.9.1:30000", testtime.Timeout); err != nil || server != a.String() {
				t.Errorf("NodePort: %q, %v", server, err)
			}
			wait := silence
			if on {
				wait = testtime.Timeout
			}
			server, err := reach(r, "", "127.0.0.1:30000", wait)
			if on != (err == nil && server == a.String()) {
				t.Errorf("LocalhostNodePorts %v: NodePort at the loopback address: %q, %v", on, server, err)
			}
			if !on {
				continue
			}
			// The guard treats another address of this host like a neighbor's.
			if _, err := reach(r, "192.168.9.1:0", "127.0.0.1:9090", silence); err == nil {
				t.Error("another address can reach the loopback range")
			}
			if c, err := r.host().Dial(t.Context(), "tcp", "", "127.0.0.1:9090"); err != nil {
				t.Errorf("a loopback address cannot reach the loopback range: %v", err)
			} else {
				c.Close()
			}
		}
	})
}
