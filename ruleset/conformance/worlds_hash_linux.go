package conformance

import (
	"context"
	"net/netip"
	"strings"

	"github.com/go-proxier/proxier/internal/testing/netlab"
	"github.com/go-proxier/proxier/tracker"
)

// reversed are sixPods in another order.
const reversed = "remote3,remote2,remote1,pod3,pod2,pod1"

// hashPacketWorlds returns worlds about endpoints chosen by a hash of the source.
func hashPacketWorlds() []world {
	need := []Feature{ConsistentHash}
	c := config{clients: affinityClients}
	return []world{
		{name: "hash of the source", needs: need, config: c, run: packets(func(w *World) {
			const web = "set web cluster=1 type=NodePort ports=80:30080 external=1 hash=source endpoints="
			runScript(w, web+sixPods)
			runScript(w, "set other cluster=2 endpoints=pod1,remote1")
			// Another node that learned of the endpoints in another order.
			other := newWorld(w.tb, w.options, c)
			runScript(other, web+reversed)
			for _, to := range []target{clusterIP(1, 80), atPrimary(30080), externalIP(1, 80)} {
				before := w.chosen(tcp, to)
				for range 3 {
					w.same("for no reason", before, w.chosen(tcp, to))
				}
				other.same("on another node", before, other.chosen(tcp, to))
				for _, f := range w.Env.Families {
					if n := used(f, before); n < 3 {
						w.tb.Errorf("%s: %d clients were sent to %d of 6 endpoints", f, affinityClients, n)
					}
				}
			}
			runScript(w, "check client1 pod3 pod1 node -> external1:80 = pod1* pod2* pod3* remote1* remote2* remote3*")

			// Changes of another Service, and a full resync.
			to := clusterIP(1, 80)
			before := w.chosen(tcp, to)
			runScript(w, "change other endpoints=pod2")
			w.same("though only another service changed", before, w.chosen(tcp, to))
			w.Cursor.Resync()
			w.same("by a full resync", before, w.chosen(tcp, to))

			// An endpoint is removed: its clients move, and few others do. When it is
			// added again, they return.
			runScript(w, "change web endpoints=pod2,pod3,remote1,remote2,remote3")
			moved := 0
			now := w.chosen(tcp, to)
			for c, ep := range before {
				switch gone := w.podAt(c.family, ep.Addr()) == "pod1"; {
				case gone && now[c] == ep:
					w.tb.Errorf("%s is still sent to %s, which was removed", c, ep)
				case !gone && now[c] != ep:
					moved++
				}
			}
			if moved > len(before)/5 {
				w.tb.Errorf("%d of %d clients moved away from endpoints that stayed", moved, len(before))
			}
			runScript(w, "change web endpoints="+sixPods)
			if now := w.chosen(tcp, to); w.does(HashOfEndpoints) {
				w.same("after an endpoint was removed and added", before, now)
			}
		})},

		{name: "hash of source and port", needs: append(need, UDP), run: packets(hashOfSourceAndPort)},

		{name: "hash and distribution", needs: append(need, Distribution, WeightedEndpoints), run: packets(func(w *World) {
			for _, pods := range []string{
				"pod1/weight=1,pod2/weight=1,pod3/weight=1,remote1/weight=1,remote2/weight=1",
				"pod1/weight=1,pod2/weight=2,pod3/weight=3,remote1/weight=4,remote2/weight=6",
			} {
				runScript(w, "set web cluster=1 hash=source-and-port endpoints="+pods)
				w.distribution(clusterIP(1, 80), pods)
			}
		})},
	}
}

// hashOfSourceAndPort compares the endpoints of flows on two nodes.
func hashOfSourceAndPort(w *World) {
	const flows = 200
	const web = "set web cluster=1 hash=source-and-port endpoints="
	runScript(w, web+sixPods)
	w.Sync()
	other := newWorld(w.tb, w.options, config{})
	runScript(other, web+strings.TrimSuffix(reversed, ",pod1"))
	other.Sync()
	for _, f := range w.Env.Families {
		a, b := w.flows(f, clusterIP(1, 80), 20000, flows), other.flows(f, clusterIP(1, 80), 20000, flows)
		moved, gone := 0, 0
		for i := range a {
			if w.podAt(f, a[i].Addr()) == "pod1" {
				gone++
			} else if a[i] != b[i] {
				moved++
			}
		}
		if gone == 0 || gone > flows/3 {
			w.tb.Errorf("%s: one of 6 endpoints has %d of %d flows", f, gone, flows)
		}
		if moved > flows/10 {
			w.tb.Errorf("%s: without one of 6 endpoints %d of %d flows move between the others", f, moved, flows)
		}
	}
	runScript(other, "change web endpoints="+reversed)
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
