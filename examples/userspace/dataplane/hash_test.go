package dataplane

import (
	"net"
	"net/netip"
	"slices"
	"testing"

	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/ruleset/maglev"
	"github.com/go-proxier/proxier/tracker"
)

// TestHashChoosesTheTablesEndpoint includes an endpoint that cannot be reached. Its
// connections must go to the endpoint of the table without it.
func TestHashChoosesTheTablesEndpoint(t *testing.T) {
	t.Parallel()
	const seed = 99
	w, port := newHashedWorld(t, Config{}, tracker.HashSourcePort, seed), freePort(t, "tcp")
	dead := netip.AddrPortFrom(netip.MustParseAddr("127.0.0.1"), freePort(t, "tcp"))
	names := map[netip.AddrPort]string{}
	all := []netip.AddrPort{dead}
	for _, name := range []string{"a", "b", "c"} {
		at := serveTCP(t, name)
		names[at] = name
		all = append(all, at)
	}
	w.service("web", tcp, port)
	w.endpoints("web", tcp, all...)
	w.sync()
	svc := w.engine.Snapshot().Ports[0]
	table, pool := svc.Maglev(ruleset.TargetCluster, seed), svc.Pool(ruleset.TargetCluster)
	alive := slices.DeleteFunc(slices.Clone(pool), func(ep *tracker.Endpoint) bool { return ep.Addr == dead })
	var members []maglev.Member
	for _, ep := range alive {
		members = append(members, maglev.Member{Addr: ep.Addr, Weight: ep.Weight})
	}
	without := maglev.Build(seed, table.Len(), members)
	retried, seen := 0, map[string]bool{}
	for range 100 {
		c := w.connect(port)
		from := c.LocalAddr().(*net.TCPAddr).AddrPort()
		to := pool[table.Find(svc.HashOf(from, seed))].Addr
		if to == dead {
			retried++
			to = alive[without.Find(svc.HashOf(from, seed))].Addr
		}
		seen[c.name] = true
		if c.name != names[to] {
			t.Fatalf("%s is sent to %s, not to %s", from, c.name, names[to])
		}
		c.Close()
	}
	if len(seen) != 3 || retried == 0 {
		t.Errorf("%d of 100 connections were to an endpoint that cannot be reached, the others reached %v", retried, seen)
	}
}

func TestHashChoosesTheEndpointOfDatagrams(t *testing.T) {
	t.Parallel()
	w, port := newHashedWorld(t, Config{}, tracker.HashSource, 1), freePort(t, "udp")
	a, _ := serveUDP(t, "a", nil)
	b, _ := serveUDP(t, "b", nil)
	w.service("dns", udp, port)
	w.endpoints("dns", udp, a, b)
	w.sync()
	svc := w.engine.Snapshot().Ports[0]
	to := svc.Pool(ruleset.TargetCluster)[svc.Maglev(ruleset.TargetCluster, 1).Find(maglev.HashAddr(1, netip.MustParseAddr("127.0.0.1")))].Addr
	want := map[netip.AddrPort]string{a: "a x", b: "b x"}[to]
	for range 10 {
		expect(t, udpClient(t, port), "x", want)
	}
}
