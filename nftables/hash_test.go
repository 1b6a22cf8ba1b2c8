//go:build linux

package nftables

import (
	"context"
	"fmt"
	"net"
	"net/netip"
	"testing"
	"time"

	v1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"

	"github.com/go-proxier/proxier/internal/testing/must"
	"github.com/go-proxier/proxier/internal/testing/netlab"
	"github.com/go-proxier/proxier/internal/testing/worldgen"
	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/tracker"
)

// TestKernelHashEqualsGoHash sends datagrams from many sources through the kernel and compares
// the endpoint that answers with the one that Go finds in the same table.
func TestKernelHashEqualsGoHash(t *testing.T) {
	t.Parallel()
	const seed = 0x1234_5678_9abc_def0
	h := netlab.NewHost(t)
	for _, f := range []struct {
		family                    tracker.Family
		clients, endpoints, route string
	}{
		{tracker.IPv4, "192.168.8.%d", "192.168.9.%d", "10.96.0.0/16"},
		{tracker.IPv6, "fd00:8::%x", "fd00:9::%x", "fd00:10:96::/64"},
	} {
		slice := epSlice(0, f.family)
		for i := range 7 {
			a := netip.MustParseAddr(fmt.Sprintf(f.endpoints, i+1))
			must.Do(t, h.AddAddr("lo", netip.PrefixFrom(a, a.BitLen())))
			slice.Endpoints = append(slice.Endpoints, discovery.Endpoint{Addresses: []string{a.String()}})
			c := must.Get(h.ListenPacket("udp", netip.AddrPortFrom(a, 8080).String()))(t)
			t.Cleanup(func() { c.Close() })
			go func() {
				for {
					_, from, err := c.ReadFrom(make([]byte, 1))
					if err != nil {
						return
					}
					c.WriteTo([]byte(a.String()), from)
				}
			}()
		}
		for i := range 3 {
			a := netip.MustParseAddr(fmt.Sprintf(f.clients, i+1))
			must.Do(t, h.AddAddr("lo", netip.PrefixFrom(a, a.BitLen())))
		}
		must.Do(t, h.AddRoute(netip.MustParsePrefix(f.route), netip.Addr{}, "lo"))

		b := must.Get(New(t.Context(), Config{NetNS: h.File(), Families: []tracker.Family{f.family}}))(t)
		t.Cleanup(func() { b.Close() })
		trk := must.Get(tracker.New(tracker.Config{OnService: worldgen.OnService}))(t)
		e := must.Get(ruleset.NewEngine(ruleset.Config{Source: trk, HashSeed: seed}))(t)
		for i, hash := range []tracker.Hash{tracker.HashSource, tracker.HashSourcePort} {
			trk.SetService(svc(i, func(s *v1.Service) {
				worldgen.SetHash(s, hash)
				s.Spec.Ports[0].Protocol = v1.ProtocolUDP
			}))
			es := slice.DeepCopy()
			*es.Ports[0].Protocol = v1.ProtocolUDP
			es.Name, es.Labels[discovery.LabelServiceName] = fmt.Sprint("s", i), fmt.Sprint("svc-", i)
			trk.SetSlice(es)
		}
		trk.MarkSynced(tracker.KindServices, tracker.KindSlices, tracker.KindNodes)
		must.Do(t, e.Attach("nftables", b).Sync(context.Background()))

		checked := 0
		for _, s := range e.Snapshot().Ports {
			if s.Key.Family != f.family {
				continue
			}
			pool, table := s.Pool(ruleset.TargetCluster), s.Maglev(ruleset.TargetCluster, seed)
			for i := range 120 {
				// Each port is used once: a process that another test starts may have a closed
				// socket until it executes its program.
				from := netip.AddrPortFrom(netip.MustParseAddr(fmt.Sprintf(f.clients, i%3+1)), uint16(20000+checked))
				want := pool[table.Find(s.HashOf(from, seed))].Addr.Addr()
				c := must.Get(h.Dial(t.Context(), "udp", from.String(), netip.AddrPortFrom(s.Frontends[0].Addr, s.Frontends[0].Port).String()))(t)
				if got := answer(t, c); got != want.String() {
					t.Fatalf("%s, hash of %s: %s leads to %s, not to %s", s.Key, s.Hash(), from, got, want)
				}
				c.Close()
				checked++
			}
		}
		if checked != 240 {
			t.Errorf("%d datagrams were sent", checked)
		}
	}
}

// answer sends a datagram until an answer comes, and returns the answer's text.
func answer(t *testing.T, c net.Conn) string {
	t.Helper()
	buf := make([]byte, 100)
	for range 20 {
		must.Get(c.Write([]byte("x")))(t)
		c.SetReadDeadline(time.Now().Add(time.Second))
		if n, err := c.Read(buf); err == nil {
			return string(buf[:n])
		}
	}
	t.Fatalf("no answer from %s", c.RemoteAddr())
	return ""
}
