package conformance

// topologyWorlds returns worlds about zone and node hints.
func topologyWorlds() []world {
	return []world{
		{name: "topology hints", run: func(w cluster) {
			zones := []endpoint{
				{pod: "pod1", zones: []string{zone}},
				{pod: "remote1", zones: []string{zone, "zone-b"}},
				{pod: "remote2", zones: []string{"zone-b"}},
				{pod: "remote3", zones: []string{"zone-c"}},
			}
			w.set(
				service{name: "zones", number: 1, ports: tcpAndUDP(0), endpoints: zones},
				service{name: "nodes", number: 2, ports: tcpAndUDP(0), endpoints: []endpoint{
					{pod: "pod1", zones: []string{zone}, nodes: []string{nodeName}},
					{pod: "pod2", zones: []string{zone}, nodes: []string{nodeName, remoteName}},
					{pod: "remote1", zones: []string{zone}, nodes: []string{remoteName}},
				}},
				service{name: "plain", number: 3, ports: tcpAndUDP(0), endpoints: on("pod2", "remote3")})
			plain := row{from: "pod3", to: clusterIP(3, 80), want: "pod2 remote3"}
			w.check(overUDP(
				row{from: "pod3", to: clusterIP(1, 80), want: "pod1 remote1"},
				row{from: "pod3", to: clusterIP(2, 80), want: "pod1 pod2"},
				plain,
			)...)

			// The node is in another zone, then in none.
			n := w.node()
			n.Zone = "zone-b"
			w.setNode(n)
			w.check(overUDP(
				row{from: "pod3", to: clusterIP(1, 80), want: "remote1 remote2"},
				row{from: "pod3", to: clusterIP(2, 80), want: "pod1 pod2"},
				plain,
			)...)
			n.Zone = "zone-x"
			w.setNode(n)
			w.check(overUDP(
				row{from: "pod3", to: clusterIP(1, 80), want: "pod1 remote1 remote2 remote3"},
				plain,
			)...)
			n.Zone = zone
			w.setNode(n)

			// One endpoint without a hint disables hints.
			w.change("zones", func(s *service) {
				s.endpoints = append(on("pod2"), s.endpoints...)
			})
			w.check(overUDP(
				row{from: "pod3", to: clusterIP(1, 80), want: "pod1 pod2 remote1 remote2 remote3"},
				plain,
			)...)

			// The only ready endpoint of the zone is removed.
			w.change("zones", func(s *service) {
				s.endpoints = zones[2:]
			})
			w.check(overUDP(
				row{from: "pod3", to: clusterIP(1, 80), want: "remote2 remote3"},
				plain,
			)...)
		}},

		{name: "topology hints and policies", run: func(w cluster) {
			// Hints restrict only traffic that may use every endpoint. Local means
			// every local endpoint, whatever its hints.
			w.set(service{name: "web", number: 1, kind: "NodePort", ports: tcpAndUDP(30080), externalLocal: true, endpoints: []endpoint{
				{pod: "pod1", zones: []string{"zone-b"}},
				{pod: "pod2", zones: []string{"zone-b"}},
				{pod: "remote1", zones: []string{zone}},
			}})
			w.check(overUDP(
				row{from: "pod3", to: clusterIP(1, 80), want: "remote1"},
				row{from: "client1", to: atPrimary(30080), want: "pod1 pod2"},
				row{from: "pod3", to: atPrimary(30080), want: "remote1"},
			)...)
		}},
	}
}
