package conformance

// passWorlds returns worlds about Services whose packets pass while the node has no endpoint
// for them. The remote node serves the addresses itself, so a packet that passes reaches it.
func passWorlds() []world {
	elsewhere := config{elsewhere: []target{externalIP(1, 80), loadBalancerIP(1, 80)}}
	// The remote node's pods have the addresses, too.
	const others = "client1 pod1 pod3 node"
	at := func(to []target, rows ...row) []row {
		var out []row
		for _, t := range to {
			for _, r := range rows {
				r.to = t
				out = append(out, overUDP(r)...)
			}
		}
		return out
	}
	external, nodePorts := []target{externalIP(1, 80), loadBalancerIP(1, 80)}, []target{atPrimary(30080), atSecondary(30080)}
	return []world{
		{name: "packets pass without endpoints", config: elsewhere, run: func(w cluster) {
			w.set(service{
				name: "web", number: 1, kind: "LoadBalancer", ports: tcpAndUDP(30080), pass: true,
				externalIPs: true, loadBalancerIPs: true,
			})
			// The cluster IP and the NodePort still refuse.
			refused := append(at(nodePorts, row{from: everyone, want: "reject"}), overUDP(row{from: everyone, to: clusterIP(1, 80), want: "reject"})...)
			w.check(append(at(external, row{from: others, want: "pass"}), refused...)...)
			for range 2 {
				w.change("web", func(s *service) { s.endpoints = on("pod1", "remote1") })
				w.check(at(external, row{from: others, want: "pod1* remote1*"})...)
				w.change("web", func(s *service) { s.endpoints = nil })
				w.check(at(external, row{from: others, want: "pass"})...)
				w.resync()
			}
			// Endpoints that terminate still serve.
			w.change("web", func(s *service) {
				s.endpoints = []endpoint{{pod: "pod2", unready: true, serving: true, terminating: true}}
			})
			w.check(at(external, row{from: others, want: "pod2*"})...)
			w.change("web", func(s *service) { s.endpoints[0].serving = false })
			w.check(at(external, row{from: others, want: "pass"})...)
			// Source ranges are the matter of the node that has endpoints.
			w.change("web", func(s *service) { s.sources = []string{"203.0.113.0/24", "2001:db8:99::/64"} })
			w.check(at(external, row{from: others, want: "pass"})...)
			w.change("web", func(s *service) { s.sources, s.pass = nil, false })
			w.check(at(external, row{from: others, want: "reject"})...)
			w.change("web", func(s *service) { s.pass = true })
			w.check(append(at(external, row{from: others, want: "pass"}), refused...)...)
			w.remove("web")
			w.check(at(external, row{from: others, want: "pass"})...)
		}},

		{name: "packets pass without local endpoints", config: elsewhere, run: func(w cluster) {
			w.set(service{
				name: "web", number: 1, kind: "LoadBalancer", ports: tcpAndUDP(30080), pass: true, externalLocal: true,
				externalIPs: true, loadBalancerIPs: true, endpoints: on("remote1", "remote2"),
			})
			passing := func() {
				w.check(at(external,
					row{from: "client1", want: "pass"},
					// The node and its pods may use every endpoint.
					row{from: "pod1 pod3", want: "remote1 remote2"},
					row{from: "node", want: "remote1* remote2*"},
				)...)
				w.check(at(nodePorts, row{from: "client1", want: "drop"}, row{from: "pod3", want: "remote1 remote2"})...)
			}
			passing()
			w.change("web", func(s *service) { s.endpoints = on("pod1", "remote1") })
			w.check(at(external, row{from: "client1", want: "pod1"}, row{from: "pod3", want: "pod1 remote1"})...)
			w.change("web", func(s *service) { s.endpoints = on("remote1", "remote2") })
			passing()
			w.resync()
			passing()
			// No endpoint anywhere: everything passes.
			w.change("web", func(s *service) { s.endpoints = nil })
			w.check(at(external, row{from: others, want: "pass"})...)
			w.change("web", func(s *service) { s.endpoints = on("remote1", "remote2") })
			passing()
			w.change("web", func(s *service) { s.pass = false })
			w.check(at(external, row{from: "client1", want: "drop"})...)
			w.change("web", func(s *service) { s.pass, s.externalLocal = true, false })
			w.check(at(external, row{from: others, want: "remote1* remote2*"})...)
		}},

		{name: "source ranges while packets pass", config: elsewhere, needs: []Feature{SourceRanges}, run: func(w cluster) {
			to := loadBalancerIP(1, 80)
			w.set(service{
				name: "web", number: 1, kind: "LoadBalancer", ports: tcpAndUDP(0), pass: true, externalLocal: true,
				loadBalancerIPs: true, endpoints: on("remote1"),
				sources: []string{"192.0.2.10/32", "10.244.1.13/32", "2001:db8:1::a/128", "fd00:10:244:1::13/128"},
			})
			w.check(overUDP(
				row{from: "client1", to: to, want: "pass"},
				row{from: "pod3", to: to, want: "remote1"},
				row{from: "client2 pod1 node", to: to, want: "drop"},
			)...)
			w.change("web", func(s *service) { s.endpoints = on("pod1") })
			w.check(overUDP(row{from: "client1 pod3", to: to, want: "pod1"}, row{from: "client2", to: to, want: "drop"})...)
		}},

		{name: "packets to one of two ports pass", needs: []Feature{OtherPorts}, config: elsewhere, run: func(w cluster) {
			w.set(
				service{name: "a", number: 1, externalIPs: true, pass: true},
				service{name: "b", number: 2, externalIPs: true, externalNumber: 1, ports: []port{{port: 81}}, endpoints: on("pod2")})
			w.check(
				row{others, tcp, externalIP(1, 80), "pass"},
				row{others, tcp, externalIP(1, 81), "pod2*"})
			w.change("a", func(s *service) { s.endpoints = on("pod1") })
			w.check(row{others, tcp, externalIP(1, 80), "pod1*"})
		}},

		{name: "packets pass at addresses of the node", config: config{bound: []target{externalIP(1, 80), loadBalancerIP(1, 80)}}, run: func(w cluster) {
			w.set(service{name: "web", number: 1, kind: "LoadBalancer", ports: tcpAndUDP(0), pass: true, externalIPs: true, loadBalancerIPs: true})
			// No process of the node listens there.
			w.check(at(external, row{from: everyone, want: "pass"})...)
			w.change("web", func(s *service) { s.endpoints = on("pod1", "remote1") })
			w.check(at(external, row{from: everyone, want: "pod1* remote1*"})...)
			w.change("web", func(s *service) { s.endpoints = nil })
			w.check(at(external, row{from: everyone, want: "pass"})...)
		}},

		{name: "owner of an address lets packets pass", config: elsewhere, run: func(w cluster) {
			w.set(
				service{name: "a", number: 1, created: 1000, externalIPs: true, pass: true},
				service{name: "b", number: 2, created: 2000, externalIPs: true, externalNumber: 1, endpoints: on("pod2")})
			to := externalIP(1, 80)
			w.check(row{others, tcp, to, "pass"})
			w.change("a", func(s *service) { s.endpoints = on("pod1") })
			w.check(row{others, tcp, to, "pod1*"})
			w.change("a", func(s *service) { s.externalIPs = false })
			w.check(row{others, tcp, to, "pod2*"})
			// b loses the address to a Service that has no frontend there.
			w.change("a", func(s *service) { s.externalIPs, s.endpoints = true, nil })
			w.check(row{others, tcp, to, "pass"})
			w.resync()
			w.check(row{others, tcp, to, "pass"})
			w.remove("a")
			w.check(row{others, tcp, to, "pod2*"})
		}},
	}
}
