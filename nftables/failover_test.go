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

	"github.com/go-proxier/proxier/internal/netlab"
	"github.com/go-proxier/proxier/internal/worldgen"
	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/tracker"
)

// TestFailover has the packets of established connections come by another node
// from some moment on, which knows the same endpoints and nothing of the
// connections: those of a hashed Service live, those of another do not.
func TestFailover(t *testing.T) {
	t.Parallel()
	netlab.Require(t)
	lab, err := netlab.New()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { lab.Close() })
	must := func(errs ...error) {
		t.Helper()
		for _, err := range errs {
			if err != nil {
				t.Fatal(err)
			}
		}
	}
	hosts := map[string]*netlab.Host{}
	for _, name := range []string{"client", "a", "b", "server", "near", "far"} {
		hosts[name], err = lab.Host(name)
		must(err)
	}
	addr := func(s string) netip.Addr { return netip.MustParseAddr(s) }
	// Two wires: the client's and the server's, with the nodes between them.
	for wire, ends := range map[string][]string{"near": {"client", "a", "b"}, "far": {"server", "a", "b"}} {
		var ports []string
		for _, end := range ends {
			must(lab.Link(hosts[wire], end, hosts[end], wire))
			ports = append(ports, end)
		}
		must(hosts[wire].AddBridge("br", ports...))
	}
	var nodes []*netlab.Host
	for i, name := range []string{"a", "b"} {
		n := hosts[name]
		must(n.AddAddr("near", netip.PrefixFrom(addr(fmt.Sprintf("10.1.0.%d", i+2)), 24)),
			n.AddAddr("far", netip.PrefixFrom(addr(fmt.Sprintf("10.2.0.%d", i+2)), 16)), n.Forward())
		nodes = append(nodes, n)
	}
	client, server := hosts["client"], hosts["server"]
	must(client.AddAddr("near", netip.MustParsePrefix("10.1.0.1/24")), client.AddRoute(netip.MustParsePrefix("10.96.0.0/16"), addr("10.1.0.2"), ""),
		server.AddAddr("far", netip.MustParsePrefix("10.2.0.1/16")), server.AddRoute(netip.MustParsePrefix("10.1.0.0/24"), addr("10.2.0.2"), ""))

	slice := epSlice(0, tracker.IPv4)
	for i := range 5 {
		a := addr(fmt.Sprintf("10.2.1.%d", i))
		must(server.AddAddr("far", netip.PrefixFrom(a, 16)))
		slice.Endpoints = append(slice.Endpoints, discovery.Endpoint{Addresses: []string{a.String()}})
		l, err := server.Listen("tcp", netip.AddrPortFrom(a, 8080).String())
		must(err)
		t.Cleanup(func() { l.Close() })
		go func() {
			for {
				c, err := l.Accept()
				if err != nil {
					return
				}
				go func() {
					defer c.Close()
					io.Copy(c, c)
				}()
			}
		}()
	}
	program := func(h *netlab.Host) {
		t.Helper()
		b, err := New(Config{NetNS: h.FD(), Families: []tracker.Family{tracker.IPv4}})
		must(err)
		t.Cleanup(func() { b.Close() })
		trk, err := tracker.New(tracker.Config{OnService: worldgen.OnService})
		must(err)
		e, err := ruleset.NewEngine(ruleset.Config{Tracker: trk, HashSeed: 11})
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
		trk.MarkSynced(tracker.Services, tracker.Slices, tracker.Nodes)
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
			c, err := client.Dial(t.Context(), "tcp", "", fmt.Sprintf("10.96.0.%d:80", i+1))
			must(err)
			t.Cleanup(func() { c.Close() })
			must(echo(c, 4*time.Second))
			connections[i] = append(connections[i], c)
		}
	}
	slices.Reverse(slice.Endpoints)
	program(nodes[1])
	must(client.AddRoute(netip.MustParsePrefix("10.96.0.0/24"), addr("10.1.0.3"), ""),
		server.AddRoute(netip.MustParsePrefix("10.1.0.1/32"), addr("10.2.0.3"), ""))
	for _, c := range connections[0] {
		if err := echo(c, 4*time.Second); err != nil {
			t.Errorf("connection from %s: %v", c.LocalAddr(), err)
		}
	}
	// The same without a hash shows that it was the hash.
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
