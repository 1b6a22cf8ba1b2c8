package conformance

import "github.com/go-proxier/proxier/tracker"

// hashWorlds returns worlds about endpoints chosen by a hash of the source.
func hashWorlds() []world {
	pods := []string{"pod1", "pod2", "pod3", "remote1", "remote2", "remote3"}
	need := []Feature{ConsistentHash}
	c := config{clients: affinityClients}
	return []world{
		{name: "hash and policies", needs: need, run: func(w cluster) {
			w.set(service{name: "web", number: 1, kind: "LoadBalancer", ports: tcpAndUDP(30080), loadBalancerIPs: true, externalLocal: true, hash: tracker.HashSource, endpoints: on("pod1", "pod2", "remote1")})
			w.check(overUDP(
				row{from: "client1 client2", to: atPrimary(30080), want: "pod1 pod2"},
				row{from: "client1 client2", to: loadBalancerIP(1, 80), want: "pod1 pod2"},
				row{from: "pod3", to: loadBalancerIP(1, 80), want: "pod1 pod2 remote1"},
				row{from: "client1", to: clusterIP(1, 80), want: "pod1* pod2* remote1*"},
			)...)
			w.change("web", func(s *service) { s.endpoints = on("remote1", "remote2") })
			w.check(
				row{"client1", tcp, atPrimary(30080), "drop"},
				row{"pod3", tcp, atPrimary(30080), "remote1 remote2"},
			)
			w.change("web", func(s *service) { s.endpoints = nil })
			w.check(row{"client1", tcp, clusterIP(1, 80), "reject"})
		}},

		{name: "hash switched on and off", needs: need, run: func(w cluster) {
			row := row{"client1", tcp, clusterIP(1, 80), ""}
			for _, h := range []tracker.Hash{tracker.HashNone, tracker.HashSource, tracker.HashSourcePort, tracker.HashNone, tracker.HashSourcePort} {
				for _, pods := range [][]string{{"pod1", "pod2", "remote1"}, {"remote1"}, {"remote2", "pod1"}} {
					w.set(service{name: "web", number: 1, endpoints: on(pods...), hash: h})
					row.want = ""
					for _, p := range pods {
						row.want += p + "* "
					}
					w.check(row)
				}
			}
		}},

		{name: "hash and affinity", needs: append(need, Affinity), config: c, run: func(w cluster) {
			w.set(
				service{name: "web", number: 1, ports: tcpAndUDP(0), hash: tracker.HashSource, affinity: 10800, endpoints: on(pods[:4]...)},
				service{name: "plain", number: 2, ports: tcpAndUDP(0), hash: tracker.HashSource, endpoints: on(pods[:4]...)})
			to := clusterIP(1, 80)
			before := w.chosen(tcp, to)
			w.same("by affinity, though nothing was remembered", w.chosen(tcp, clusterIP(2, 80)), before)
			// Clients with affinity keep endpoints that the hash would change.
			w.change("web", func(s *service) { s.endpoints = on(pods...) })
			w.same("though it is remembered", before, w.chosen(tcp, to))
		}},
	}
}
