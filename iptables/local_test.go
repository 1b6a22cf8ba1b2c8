//go:build linux

package iptables

import (
	"net/netip"
	"strings"
	"testing"
	"time"

	v1 "k8s.io/api/core/v1"

	"github.com/go-proxier/proxier/conntrack"
	"github.com/go-proxier/proxier/internal/testing/backendtest"
	"github.com/go-proxier/proxier/internal/testing/must"
	"github.com/go-proxier/proxier/internal/testing/testtime"
	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/ruleset/conformance"
	"github.com/go-proxier/proxier/tracker"
)

// TestNodeIsRefusedAtNodePorts sends from the node to a NodePort without endpoints. No packet
// may reach the node's own server at the port. The same holds at loopback addresses if
// NodePorts answer there, and only then.
func TestNodeIsRefusedAtNodePorts(t *testing.T) {
	t.Parallel()
	flavors(t, func(t *testing.T, flavor Flavor) {
		t.Parallel()
		for _, localhost := range []bool{true, false} {
			r := newRig(t, onLinux(flavor), func(c *Config) { c.LocalhostNodePorts = localhost })
			own := backendtest.OwnServer(t, r.host())
			r.tracker.SetService(svc(0, nodePort(30080), overUDP))
			r.tracker.SetService(svc(1, nodePort(30080)))
			r.sync()
			backendtest.NodeIsRefused(t, r.host(), own...)
			if localhost {
				backendtest.NodeIsRefused(t, r.host(), netip.MustParseAddr("127.0.0.1"), netip.MustParseAddr("127.0.0.2"))
			} else if err := r.host().RefusedUDP("127.0.0.1:30080", testtime.Timeout); err == nil {
				t.Error("127.0.0.1 is refused, although NodePorts do not answer there")
			}
		}
	})
}

// TestOtherHostsReachNoLoopbackNodePort sends from another host to NodePorts at loopback addresses, where
// NodePorts answer the node itself.
func TestOtherHostsReachNoLoopbackNodePort(t *testing.T) {
	t.Parallel()
	flavors(t, func(t *testing.T, flavor Flavor) {
		t.Parallel()
		w := conformance.NewWorld(t, conformance.Options{Families: []tracker.Family{tracker.IPv4}, New: func(tb testing.TB, env conformance.Env) ruleset.Backend {
			c := testConfig(tb, flavor)
			c.NetNS, c.Families, c.LocalhostNodePorts = env.NetNS, env.Families, true
			b := must.Get(New(tb.Context(), c))(tb)
			tb.Cleanup(func() { b.Close() })
			return b
		}})
		pod := w.Pods()[0].Addr(tracker.IPv4).String()
		for i, proto := range []v1.Protocol{v1.ProtocolTCP, v1.ProtocolUDP} {
			over := backendtest.Over(proto)
			w.Tracker.SetService(svc(2*i, nodePort(30080), over))
			es := slice(2*i, tracker.IPv4)
			es.Endpoints, es.Ports[0].Protocol = append(es.Endpoints, backendtest.Endpoint(pod, thisNode)), &proto
			w.Tracker.SetSlice(es)
			w.Tracker.SetService(svc(2*i+1, nodePort(30081), over)) // has no endpoint
		}
		w.Sync()
		for _, p := range []v1.Protocol{v1.ProtocolTCP, v1.ProtocolUDP} {
			if _, err := w.Reach(conformance.Target{Addr: netip.MustParseAddrPort("192.0.2.1:30080"), Protocol: p}, testtime.Timeout); err != nil {
				t.Error(err)
			}
			for _, to := range []string{"127.0.0.1:30080", "127.0.0.1:30081", "127.0.0.1:9000", "127.200.3.4:30080"} {
				server, err := w.Reach(conformance.Target{Addr: netip.MustParseAddrPort(to), Protocol: p}, 300*time.Millisecond)
				if err == nil || strings.Contains(err.Error(), "refused") {
					t.Errorf("%s %s: reached %v, %v", p, to, server, err)
				}
			}
		}
	})
}

// TestClientsAreRefusedAtClusterIPsOfTheNode sends from another host to a cluster IP that is an
// address of the node, where a server of the node listens. While the Service has no endpoints, no
// packet may reach that server.
func TestClientsAreRefusedAtClusterIPsOfTheNode(t *testing.T) {
	t.Parallel()
	flavors(t, func(t *testing.T, flavor Flavor) {
		t.Parallel()
		w := conformance.NewWorld(t, conformance.Options{New: newForWorld(flavor)})
		const v4, v6, port = "192.0.2.1", "2001:db8:1::1", 9000
		at := func(p int32) func(*v1.Service) {
			return func(s *v1.Service) {
				s.Spec.ClusterIP, s.Spec.ClusterIPs = v4, []string{v4, v6}
				s.Spec.Ports[0].Port = p
			}
		}
		for _, c := range []struct {
			port    int32
			refused bool
		}{{port + 1, false}, {port, true}} {
			w.Tracker.SetService(svc(0, at(c.port)))
			w.Tracker.SetService(svc(1, at(c.port), overUDP))
			w.Sync()
			for _, a := range []string{v4, v6} {
				for _, p := range []v1.Protocol{v1.ProtocolTCP, v1.ProtocolUDP} {
					to := conformance.Target{Addr: netip.AddrPortFrom(netip.MustParseAddr(a), port), Protocol: p}
					server, err := w.Reach(to, testtime.Timeout)
					if refused := err != nil && strings.Contains(err.Error(), "refused"); refused != c.refused {
						t.Errorf("%s %s, of a Service: %t: reached %v, %v", p, to.Addr, c.refused, server, err)
					}
				}
			}
		}
	})
}

// TestRefusedSocketIsForwardedLater uses sockets that are refused at a NodePort, at an address
// of the node and at the loopback address. As soon as the Service has an endpoint, the same
// sockets must reach it.
func TestRefusedSocketIsForwardedLater(t *testing.T) {
	t.Parallel()
	flavors(t, func(t *testing.T, flavor Flavor) {
		t.Parallel()
		r := newRig(t, onLinux(flavor), func(c *Config) { c.LocalhostNodePorts = true })
		cleaner := must.Get(conntrack.New(t.Context(), conntrack.Config{NetNS: r.host().File()}))(t)
		defer cleaner.Close()
		r.cursor.Detach()
		r.cursor = r.engine.Attach("iptables", cleaner.Wrap(r.backend))
		a := netip.MustParseAddr("192.168.7.1")
		must.Do(t, r.host().AddAddr("lo", netip.PrefixFrom(a, 32)))
		r.tracker.SetService(svc(0, nodePort(30080), overUDP))
		r.sync()
		to := []netip.AddrPort{netip.MustParseAddrPort("192.168.7.1:30080"), netip.MustParseAddrPort("127.0.0.1:30080")}
		exchange := backendtest.RefusedSockets(t, r.host(), to...)
		r.host().ServeUDP(t, "192.168.7.1:8080", "endpoint")
		es, proto := slice(0, tracker.IPv4), v1.ProtocolUDP
		es.Endpoints, es.Ports[0].Protocol = append(es.Endpoints, backendtest.Endpoint(a.String(), thisNode)), &proto
		r.tracker.SetSlice(es)
		r.sync()
		must.Do(t, cleaner.Flush(t.Context()))
		for i := range to {
			if got, err := exchange(i); got != "endpoint" || err != nil {
				t.Errorf("%s: %q, %v", to[i], got, err)
			}
		}
	})
}
