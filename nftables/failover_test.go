//go:build linux

package nftables

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"net"
	"net/netip"
	"slices"
	"testing"
	"time"

	v1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"

	"github.com/go-proxier/proxier/internal/testing/must"
	"github.com/go-proxier/proxier/internal/testing/netlab"
	"github.com/go-proxier/proxier/internal/testing/testtime"
	"github.com/go-proxier/proxier/internal/testing/worldgen"
	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/tracker"
)

// TestHashedConnectionsSurviveFailover routes the packets of established connections through
// another node, which has the same endpoints but no entries of the connections. Connections of a
// hashed Service must survive, and connections of another Service do not.
func TestHashedConnectionsSurviveFailover(t *testing.T) {
	t.Parallel()
	for _, f := range []tracker.Family{tracker.IPv4, tracker.IPv6} {
		t.Run(f.String(), func(t *testing.T) {
			t.Parallel()
			testFailover(t, f)
		})
	}
}

func testFailover(t *testing.T, f tracker.Family) {
	netlab.Require(t)
	// An address of the client's wire, the server's, or the endpoints'.
	at := func(net, i int) netip.Addr {
		if f == tracker.IPv6 {
			return netip.MustParseAddr(fmt.Sprintf("fd00:10:%x::%x", net, i))
		}
		return netip.MustParseAddr(fmt.Sprintf("10.%d.0.%d", net, i))
	}
	const near, far, endpoints = 1, 2, 3
	subnet := func(a netip.Addr) netip.Prefix {
		p := must.Get(a.Prefix(map[tracker.Family]int{tracker.IPv4: 16, tracker.IPv6: 64}[f]))(t)
		return p
	}
	on := func(a netip.Addr) netip.Prefix { return netip.PrefixFrom(a, subnet(a).Bits()) }
	clusterIP := func(i int) netip.Addr {
		ips := svc(i).Spec.ClusterIPs
		if f == tracker.IPv6 {
			return netip.MustParseAddr(ips[1])
		}
		return netip.MustParseAddr(ips[0])
	}
	lab, hosts := netlab.NewHosts(t, "client", "a", "b", "server", "near", "far")
	must := func(errs ...error) {
		t.Helper()
		for _, err := range errs {
			if err != nil {
				t.Fatal(err)
			}
		}
	}
	// Two wires: the client's and the server's, with the nodes between them.
	for wire, ends := range map[string][]string{"near": {"client", "a", "b"}, "far": {"server", "a", "b"}} {
		var ports []string
		for _, end := range ends {
			lab.Link(hosts[wire], end, hosts[end], wire)
			ports = append(ports, end)
		}
		must(hosts[wire].AddBridge("br", ports...))
	}
	var nodes []*netlab.Host
	for i, name := range []string{"a", "b"} {
		n := hosts[name]
		must(n.AddAddr("near", on(at(near, i+2))), n.AddAddr("far", on(at(far, i+2))), n.AddRoute(subnet(at(endpoints, 0)), netip.Addr{}, "far"))
		n.Forward()
		nodes = append(nodes, n)
	}
	client, server := hosts["client"], hosts["server"]
	cluster := subnet(clusterIP(0))
	must(client.AddAddr("near", on(at(near, 1))), client.AddRoute(cluster, at(near, 2), ""),
		server.AddAddr("far", on(at(far, 1))), server.AddRoute(subnet(at(near, 0)), at(far, 2), ""))

	slice := epSlice(0, f)
	for i := range 5 {
		a := at(endpoints, i+1)
		must(server.AddAddr("far", on(a)))
		slice.Endpoints = append(slice.Endpoints, discovery.Endpoint{Addresses: []string{a.String()}})
		server.ServeTCP(t, netip.AddrPortFrom(a, 8080).String(), func(c net.Conn) { io.Copy(c, c) })
	}
	program := func(h *netlab.Host) {
		t.Helper()
		b, err := New(t.Context(), Config{NetNS: h.File(), Families: []tracker.Family{f}})
		must(err)
		t.Cleanup(func() { b.Close() })
		trk, err := tracker.New(tracker.Config{OnService: worldgen.OnService})
		must(err)
		e, err := ruleset.NewEngine(ruleset.Config{Source: trk, HashSeed: 11})
		must(err)
		for i := range 2 {
			trk.SetService(svc(i, func(s *v1.Service) {
				if i == 0 {
					worldgen.SetHash(s, tracker.HashSourcePort)
				}
			}))
			es := slice.DeepCopy()
			es.Name, es.Labels[discovery.LabelServiceName] = fmt.Sprint("s", i), fmt.Sprint("svc-", i)
			trk.SetSlice(es)
		}
		trk.MarkSynced(tracker.KindServices, tracker.KindSlices, tracker.KindNodes)
		must(e.Attach("nftables", b).Sync(context.Background()))
	}

	program(nodes[0])
	const each = 30
	echo := func(c net.Conn, wait time.Duration) error {
		c.SetDeadline(time.Now().Add(wait))
		if _, err := fmt.Fprintln(c, "hello"); err != nil {
			return err
		}
		_, err := bufio.NewReader(c).ReadString('\n')
		return err
	}
	var connections [2][]net.Conn
	for i := range connections {
		for range each {
			c, err := client.Dial(t.Context(), "tcp", "", netip.AddrPortFrom(clusterIP(i), 80).String())
			must(err)
			t.Cleanup(func() { c.Close() })
			must(echo(c, testtime.Timeout))
			connections[i] = append(connections[i], c)
		}
	}
	slices.Reverse(slice.Endpoints)
	program(nodes[1])
	half := func(p netip.Prefix) netip.Prefix { return netip.PrefixFrom(p.Addr(), p.Bits()+1) } // its route is preferred
	must(client.AddRoute(half(cluster), at(near, 3), ""), server.AddRoute(half(subnet(at(near, 0))), at(far, 3), ""))
	for _, c := range connections[0] {
		if err := echo(c, testtime.Timeout); err != nil {
			t.Errorf("connection from %s: %v", c.LocalAddr(), err)
		}
	}
	// The other Service shows that the hash matters.
	broken := 0
	for _, c := range connections[1] {
		if echo(c, 4*time.Second) != nil {
			broken++
		}
	}
	if broken < each/3 {
		t.Errorf("only %d of %d connections without a hash broke", broken, each)
	}
}
