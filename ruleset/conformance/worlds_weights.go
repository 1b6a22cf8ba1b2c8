package conformance

import v1 "k8s.io/api/core/v1"

// weightWorlds returns worlds about endpoints with weights.
func weightWorlds() []world {
	need := []Feature{WeightedEndpoints}
	return []world{
		{name: "weights switched on and off", needs: need, run: func(w cluster) {
			row := func(want string) row { return row{"client1", tcp, clusterIP(1, 80), want} }
			for _, weights := range []map[string]int{
				{}, {"pod1": 3}, {"pod1": 5, "pod2": 5, "remote1": 5}, {"pod1": 5, "pod2": 4, "remote1": 3}, {"remote1": 2}, {},
			} {
				w.set(service{name: "web", number: 1, endpoints: weighing(weights, "pod1", "pod2", "remote1")})
				w.check(row("pod1* pod2* remote1*"))
			}
			w.change("web", func(s *service) {
				s.endpoints = weighing(map[string]int{"pod1": 3, "pod2": 0, "remote1": 2}, "pod1", "pod2", "remote1")
			})
			w.check(row("pod1* remote1*"))
		}},

		{name: "weight 0", needs: need, run: func(w cluster) {
			none := map[string]int{"pod1": 0}
			w.set(service{name: "web", number: 1, kind: "NodePort", ports: tcpAndUDP(30080), externalIPs: true, externalLocal: true, endpoints: on("pod1", "remote1")})
			w.Sync()
			live := w.hold(w.targets([]v1.Protocol{tcp}, clusterIP(1, 80)))
			w.change("web", func(s *service) { s.endpoints = weighing(none, "pod1", "remote1") })
			w.check(
				row{"client1", tcp, clusterIP(1, 80), "remote1*"},
				row{"pod3", tcp, clusterIP(1, 80), "remote1"},
				// As without local endpoints.
				row{"client1", udp, atPrimary(30080), "drop"},
				row{"client1", tcp, externalIP(1, 80), "drop"},
			)
			none["remote1"] = 0
			w.change("web", func(s *service) { s.endpoints = weighing(none, "pod1", "remote1") })
			w.check(
				row{"client1 pod3 node", tcp, clusterIP(1, 80), "reject"},
				row{"client1", tcp, atPrimary(30080), "reject"},
			)
			if err := live(); err != nil {
				w.errorf("by endpoints of weight 0: %v", err)
			}
			w.change("web", func(s *service) { s.endpoints = on("pod1", "remote1") })
			w.check(
				row{"client1", tcp, clusterIP(1, 80), "pod1* remote1*"},
				row{"client1", tcp, atPrimary(30080), "pod1"},
			)
		}},
	}
}

// weighing returns ready endpoints with the given weights, 1 by default.
func weighing(weights map[string]int, pods ...string) []endpoint {
	out := on(pods...)
	for i := range out {
		if n, ok := weights[out[i].pod]; ok {
			out[i].weight = &n
		}
	}
	return out
}
