package conformance

// nodePortWorlds returns worlds about NodePorts.
func nodePortWorlds() []world {
	web := service{name: "web", number: 1, kind: "NodePort", ports: tcpAndUDP(30080), endpoints: on("pod1", "remote1")}
	return []world{
		{name: "node port", run: func(w cluster) {
			w.set(web)
			w.check(overUDP(
				row{from: everyone, to: atPrimary(30080), want: "pod1* remote1*"},
				row{from: everyone, to: atSecondary(30080), want: "pod1* remote1*"},
				row{from: everyone, to: atGateway(30080), want: "pod1* remote1*"},
				row{from: "pod3", to: clusterIP(1, 80), want: "pod1 remote1"},
				// Not at loopback, at other ports, or at ports of other servers.
				row{from: "loopback", to: atLoopback(30080), want: "pass"},
				row{from: everyone, to: atPrimary(30081), want: "pass"},
				row{from: everyone, to: atPrimary(nodePortOwn), want: "pass"},
			)...)
			// Another number, then none.
			w.change("web", func(s *service) { s.ports = tcpAndUDP(30081) })
			w.check(overUDP(
				row{from: everyone, to: atPrimary(30081), want: "pod1* remote1*"},
				row{from: everyone, to: atPrimary(30080), want: "pass"},
			)...)
			w.remove("web")
			w.check(overUDP(row{from: everyone, to: atPrimary(30081), want: "pass"})...)
		}},

		{
			name: "node port at primary addresses", needs: []Feature{NodePortAddresses},
			config: config{nodePortAddresses: []string{"primary"}}, run: func(w cluster) {
				w.set(web)
				w.check(overUDP(
					row{from: everyone, to: atPrimary(30080), want: "pod1* remote1*"},
					row{from: everyone, to: atSecondary(30080), want: "pass"},
					row{from: everyone, to: atGateway(30080), want: "pass"},
				)...)
				// The node's primary address changes.
				n := w.node()
				n.Addresses = each(w.families(), secondary)
				w.setNode(n)
				w.check(overUDP(
					row{from: everyone, to: atPrimary(30080), want: "pass"},
					row{from: everyone, to: atSecondary(30080), want: "pod1* remote1*"},
				)...)
			},
		},

		{
			name: "node port at CIDRs", needs: []Feature{NodePortAddresses},
			config: config{nodePortAddresses: []string{"198.51.100.0/24", "2001:db8:2::/64"}}, run: func(w cluster) {
				w.set(web)
				w.check(overUDP(
					row{from: everyone, to: atPrimary(30080), want: "pass"},
					row{from: everyone, to: atSecondary(30080), want: "pod1* remote1*"},
					row{from: everyone, to: atGateway(30080), want: "pass"},
					row{from: "loopback", to: atLoopback(30080), want: "pass"},
				)...)
			},
		},

		{
			name: "node port at loopback", needs: []Feature{NodePortAddresses, LoopbackNodePorts},
			config: config{nodePortAddresses: []string{"primary", "localhost"}}, run: func(w cluster) {
				local := func(s *service) { s.externalLocal = true }
				w.set(web)
				w.check(overUDP(
					row{from: "loopback", to: atLoopback(30080), want: "pod1* remote1*"},
					row{from: "loopback", to: atLoopback(30081), want: "pass"},
					row{from: everyone, to: atPrimary(30080), want: "pod1* remote1*"},
					row{from: everyone, to: atSecondary(30080), want: "pass"},
				)...)
				// The policy Local does not restrict the node itself.
				w.change("web", local)
				w.check(overUDP(row{from: "loopback", to: atLoopback(30080), want: "pod1* remote1*"})...)
				w.change("web", func(s *service) { s.endpoints = nil })
				w.check(overUDP(row{from: "loopback", to: atLoopback(30080), want: "reject"})...)
				w.change("web", func(s *service) { s.endpoints = on("pod2") })
				w.check(overUDP(row{from: "loopback", to: atLoopback(30080), want: "pod2*"})...)
				w.remove("web")
				w.check(overUDP(row{from: "loopback", to: atLoopback(30080), want: "pass"})...)
			},
		},
	}
}
