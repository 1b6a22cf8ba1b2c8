package conformance

import (
	"context"
	"net/netip"
	"slices"

	"github.com/go-proxier/proxier/internal/testing/netlab"
	"github.com/go-proxier/proxier/tracker"
)

// hashPacketWorlds returns worlds about endpoints chosen by a hash of the source.
func hashPacketWorlds() []world {
	pods := []string{"pod1", "pod2", "pod3", "remote1", "remote2", "remote3"}
	reversed := slices.Clone(pods)
	slices.Reverse(reversed)
	need := []Feature{ConsistentHash}
	c := config{clients: affinityClients}
	return []world{
		{name: "hash of the source", needs: need, config: c, run: packets(func(w *World) {
			s := service{name: "web", number: 1, kind: "NodePort", ports: tcpAndUDP(30080), externalIPs: true, hash: tracker.HashSource, endpoints: on(pods...)}
			w.set(s, service{name: "other", number: 2, ports: tcpAndUDP(0), endpoints: on("pod1", "remote1")})
			// Another node that learned of the endpoints in another order.
			other := newWorld(w.tb, w.options, c)
			t := s
			t.endpoints = on(reversed...)
			other.set(t)
			for _, to := range []target{clusterIP(1, 80), atPrimary(30080), externalIP(1, 80)} {
				before := w.chosen(tcp, to)
				for range 3 {
					w.same("for no reason", before, w.chosen(tcp, to))
				}
				other.same("on another node", before, other.chosen(tcp, to))
				for _, f := range w.Env.Families {
					if n := used(f, before); n < 3 {
						w.tb.Errorf("%s: %d clients were sent to %d of %d endpoints", f, affinityClients, n, len(pods))
					}
				}
			}
			w.check(overUDP(row{from: "client1 pod3 pod1 node", to: externalIP(1, 80), want: "pod1* pod2* pod3* remote1* remote2* remote3*"})...)

			// Changes of another Service, and a full resync.
			to := clusterIP(1, 80)
			before := w.chosen(tcp, to)
			w.change("other", func(s *service) { s.endpoints = on("pod2") })
			w.same("though only another service changed", before, w.chosen(tcp, to))
			w.Cursor.Resync()
			w.same("by a full resync", before, w.chosen(tcp, to))

			// An endpoint is removed: its clients move, and few others do. When it is
			// added again, they return.
			w.change("web", func(s *service) { s.endpoints = on(pods[1:]...) })
			moved := 0
			now := w.chosen(tcp, to)
			for c, ep := range before {
				switch gone := w.podAt(c.family, ep.Addr()) == pods[0]; {
				case gone && now[c] == ep:
					w.tb.Errorf("%s is still sent to %s, which was removed", c, ep)
				case !gone && now[c] != ep:
					moved++
				}
			}
			if moved > len(before)/5 {
				w.tb.Errorf("%d of %d clients moved away from endpoints that stayed", moved, len(before))
			}
			w.change("web", func(s *service) { s.endpoints = on(pods...) })
			if now := w.chosen(tcp, to); w.does(HashOfEndpoints) {
				w.same("after an endpoint was removed and added", before, now)
			}
		})},

		{name: "hash of source and port", needs: append(need, UDP), run: packets(func(w *World) {
			const flows = 200
			s := service{name: "web", number: 1, ports: tcpAndUDP(0), hash: tracker.HashSourcePort, endpoints: on(pods...)}
			w.set(s)
			w.Sync()
			other := newWorld(w.tb, w.options, config{})
			s.endpoints = on(reversed[:5]...)
			other.set(s)
			other.Sync()
			for _, f := range w.Env.Families {
				a, b := w.flows(f, clusterIP(1, 80), 20000, flows), other.flows(f, clusterIP(1, 80), 20000, flows)
				moved, gone := 0, 0
				for i := range a {
					if w.podAt(f, a[i].Addr()) == pods[0] {
						gone++
					} else if a[i] != b[i] {
						moved++
					}
				}
				if gone == 0 || gone > flows/3 {
					w.tb.Errorf("%s: one of %d endpoints has %d of %d flows", f, len(pods), gone, flows)
				}
				if moved > flows/10 {
					w.tb.Errorf("%s: without one of %d endpoints %d of %d flows move between the others", f, len(pods), moved, flows)
				}
			}
			other.change("web", func(s *service) { s.endpoints = on(reversed...) })
			other.Sync()
			for _, f := range w.Env.Families {
				a, b := w.flows(f, clusterIP(1, 80), 30000, flows), other.flows(f, clusterIP(1, 80), 30000, flows)
				differ := 0
				for i := range a {
					if a[i] != b[i] {
						differ++
					}
				}
				most := 0
				if !w.does(HashOfEndpoints) {
					most = flows / 5
				}
				if differ > most {
					w.tb.Errorf("%s: %d of %d flows get another endpoint on a node whose endpoints changed before", f, differ, flows)
				}
			}
		})},

		{name: "hash and distribution", needs: append(need, Distribution, WeightedEndpoints), run: packets(func(w *World) {
			for _, weights := range []map[string]int{
				{"pod1": 1, "pod2": 1, "pod3": 1, "remote1": 1, "remote2": 1},
				{"pod1": 1, "pod2": 2, "pod3": 3, "remote1": 4, "remote2": 6},
			} {
				w.set(service{name: "web", number: 1, ports: tcpAndUDP(0), hash: tracker.HashSourcePort, endpoints: weighing(weights, "pod1", "pod2", "pod3", "remote1", "remote2")})
				w.distribution(clusterIP(1, 80), weights)
			}
		})},
	}
}

// flows sends a datagram from each of n source ports of a client and returns the
// servers that responded.
func (w *World) flows(f tracker.Family, to target, first, n int) []netip.AddrPort {
	w.tb.Helper()
	from := w.net.hosts["client1"]
	out := make([]netip.AddrPort, n)
	for i := range out {
		ctx, cancel := context.WithTimeout(w.tb.Context(), w.timeout())
		o := outcomeOf(from.probeUDP(ctx, uint16(first+i), to.at(f)))
		cancel()
		if o.Kind != netlab.Reached {
			w.tb.Fatalf("from port %d to %s (%s): %s", first+i, to.name, to.at(f), o)
		}
		out[i] = o.Server
	}
	return out
}
