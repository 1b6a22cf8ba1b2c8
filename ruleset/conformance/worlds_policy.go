package conformance

// policyWorlds returns worlds about internalTrafficPolicy and externalTrafficPolicy Local.
func policyWorlds() []world {
	return []world{
		{name: "internal policy Local", run: func(w cluster) {
			to := clusterIP(1, 80)
			w.set(service{name: "web", number: 1, ports: tcpAndUDP(0), internalLocal: true, endpoints: on("pod1", "pod2", "remote1")})
			w.check(overUDP(
				row{from: "client1 remote3 node", to: to, want: "pod1* pod2*"},
				row{from: "pod3", to: to, want: "pod1 pod2"},
				row{from: "pod1", to: to, want: "pod1* pod2"},
			)...)
			// Only other nodes have endpoints.
			w.change("web", func(s *service) { s.endpoints = on("remote1", "remote2") })
			w.check(overUDP(row{from: everyone, to: to, want: "drop"})...)
			// No node has endpoints.
			w.change("web", func(s *service) { s.endpoints = nil })
			w.check(overUDP(row{from: everyone, to: to, want: "reject"})...)
			w.change("web", func(s *service) { s.endpoints = on("pod2", "remote1") })
			w.check(overUDP(row{from: "pod3 pod1", to: to, want: "pod2"})...)
			w.change("web", func(s *service) { s.internalLocal = false })
			w.check(overUDP(row{from: "pod3 pod1", to: to, want: "pod2 remote1"})...)
		}},

		{name: "external policy Local", run: func(w cluster) {
			everywhere := func(rows ...row) []row {
				var out []row
				for _, to := range []target{externalIP(1, 80), loadBalancerIP(1, 80), atPrimary(30080), atSecondary(30080)} {
					for _, r := range rows {
						r.to = to
						out = append(out, overUDP(r)...)
					}
				}
				return out
			}
			w.set(service{
				name: "web", number: 1, kind: "LoadBalancer", ports: tcpAndUDP(30080), externalLocal: true,
				externalIPs: true, loadBalancerIPs: true, endpoints: on("pod1", "remote1"),
			})
			w.check(everywhere(
				// External clients: local endpoints, which see the client's address.
				row{from: "client1 remote3", want: "pod1"},
				// The node and its pods: as through the cluster IP.
				row{from: "pod3", want: "pod1 remote1"},
				row{from: "pod1", want: "pod1* remote1"},
				row{from: "node", want: "pod1* remote1*"},
			)...)
			w.check(overUDP(
				row{from: "client1 remote3 node", to: clusterIP(1, 80), want: "pod1* remote1*"},
				row{from: "pod3", to: clusterIP(1, 80), want: "pod1 remote1"},
			)...)

			// Only other nodes have endpoints.
			w.change("web", func(s *service) { s.endpoints = on("remote1", "remote2") })
			w.check(everywhere(
				row{from: "client1 remote3", want: "drop"},
				row{from: "pod1 pod3", want: "remote1 remote2"},
				row{from: "node", want: "remote1* remote2*"},
			)...)

			// Only this node has endpoints.
			w.change("web", func(s *service) { s.endpoints = on("pod1", "pod2") })
			w.check(everywhere(
				row{from: "client1 remote3", want: "pod1 pod2"},
				row{from: "pod3", want: "pod1 pod2"},
				row{from: "node", want: "pod1* pod2*"},
			)...)

			// No node has endpoints.
			w.change("web", func(s *service) { s.endpoints = nil })
			w.check(everywhere(row{from: everyone, want: "reject"})...)

			// The policy changes.
			w.change("web", func(s *service) { s.endpoints = on("pod1", "remote1") })
			w.check(everywhere(row{from: "client1", want: "pod1"})...)
			w.change("web", func(s *service) { s.externalLocal = false })
			w.check(everywhere(row{from: everyone, want: "pod1* remote1*"})...)
		}},

		{name: "local endpoints preferred", run: func(w cluster) {
			everywhere := func(want string) []row {
				var out []row
				for _, to := range []target{externalIP(1, 80), loadBalancerIP(1, 80), atPrimary(30080), atSecondary(30080)} {
					out = append(out, overUDP(row{from: everyone, to: to, want: want})...)
				}
				return out
			}
			leaving := func(name string) endpoint {
				return endpoint{pod: name, unready: true, serving: true, terminating: true}
			}
			w.set(service{
				name: "web", number: 1, kind: "LoadBalancer", ports: tcpAndUDP(30080), preferLocal: true,
				externalIPs: true, loadBalancerIPs: true, endpoints: on("pod1", "remote1"),
			})
			// The policy stays Cluster: every source is replaced.
			w.check(everywhere("pod1*")...)
			w.check(overUDP(row{from: "pod3", to: clusterIP(1, 80), want: "pod1 remote1"})...)
			// Without a ready endpoint on the node, those of other nodes serve.
			w.change("web", func(s *service) { s.endpoints = on("remote1", "remote2") })
			w.check(everywhere("remote1* remote2*")...)
			w.change("web", func(s *service) { s.endpoints = append(on("remote1"), leaving("pod1")) })
			w.check(everywhere("remote1*")...)
			// No endpoint is ready, and those that still serve do.
			w.change("web", func(s *service) { s.endpoints = []endpoint{leaving("pod1"), leaving("remote1")} })
			w.check(everywhere("pod1*")...)
			w.change("web", func(s *service) { s.endpoints = nil })
			w.check(everywhere("reject")...)
			w.change("web", func(s *service) { s.endpoints = on("pod1", "pod2", "remote1") })
			w.check(everywhere("pod1* pod2*")...)
			// The policies Local are stronger, and without the preference all serve.
			w.change("web", func(s *service) { s.externalLocal, s.endpoints = true, on("remote1") })
			w.check(overUDP(row{from: "client1", to: externalIP(1, 80), want: "drop"})...)
			w.change("web", func(s *service) { s.externalLocal, s.preferLocal, s.endpoints = false, false, on("pod1", "remote1") })
			w.check(everywhere("pod1* remote1*")...)
		}},

		{name: "both policies Local", run: func(w cluster) {
			w.set(service{
				name: "web", number: 1, kind: "NodePort", ports: tcpAndUDP(30080), externalLocal: true, internalLocal: true,
				endpoints: on("pod1", "remote1"),
			})
			w.check(overUDP(
				row{from: "client1 node", to: clusterIP(1, 80), want: "pod1*"},
				row{from: "pod3", to: clusterIP(1, 80), want: "pod1"},
				row{from: "client1", to: atPrimary(30080), want: "pod1"},
				row{from: "pod3", to: atPrimary(30080), want: "pod1 remote1"},
				row{from: "node", to: atPrimary(30080), want: "pod1* remote1*"},
			)...)
			w.change("web", func(s *service) { s.endpoints = on("remote1") })
			w.check(overUDP(
				row{from: everyone, to: clusterIP(1, 80), want: "drop"},
				row{from: "client1", to: atPrimary(30080), want: "drop"},
				row{from: "pod3", to: atPrimary(30080), want: "remote1"},
			)...)
		}},

		{name: "source ranges and external policy Local", needs: []Feature{SourceRanges}, run: func(w cluster) {
			w.set(service{
				name: "web", number: 1, kind: "LoadBalancer", ports: tcpAndUDP(30080), externalLocal: true,
				loadBalancerIPs: true, endpoints: on("pod1", "remote1"),
				sources: []string{"192.0.2.10/32", "10.244.1.13/32", "2001:db8:1::a/128", "fd00:10:244:1::13/128"},
			})
			w.check(overUDP(
				row{from: "client1", to: loadBalancerIP(1, 80), want: "pod1"},
				row{from: "pod3", to: loadBalancerIP(1, 80), want: "pod1 remote1"},
				row{from: "client2 pod1 node remote3", to: loadBalancerIP(1, 80), want: "drop"},
				row{from: "client2", to: atPrimary(30080), want: "pod1"},
			)...)
		}},

		{name: "terminating endpoints", run: func(w cluster) {
			leaving := func(name string) endpoint {
				return endpoint{pod: name, unready: true, serving: true, terminating: true}
			}
			left := func(name string) endpoint { return endpoint{pod: name, unready: true, terminating: true} }
			w.set(service{
				name: "web", number: 1, kind: "NodePort", ports: tcpAndUDP(30080), externalLocal: true,
				endpoints: []endpoint{{pod: "pod1"}, leaving("pod2"), {pod: "remote1"}, leaving("remote2")},
			})
			w.check(overUDP(
				row{from: "pod3", to: clusterIP(1, 80), want: "pod1 remote1"},
				row{from: "client1", to: atPrimary(30080), want: "pod1"},
			)...)
			// No local endpoint is ready; one still serves.
			w.change("web", func(s *service) {
				s.endpoints = []endpoint{left("pod1"), leaving("pod2"), {pod: "remote1"}, leaving("remote2")}
			})
			w.check(overUDP(
				row{from: "pod3", to: clusterIP(1, 80), want: "remote1"},
				row{from: "client1", to: atPrimary(30080), want: "pod2"},
				row{from: "pod3", to: atPrimary(30080), want: "remote1"},
			)...)
			// No endpoint anywhere is ready.
			w.change("web", func(s *service) {
				s.endpoints = []endpoint{left("pod1"), leaving("pod2"), leaving("remote2")}
			})
			w.check(overUDP(
				row{from: "pod3", to: clusterIP(1, 80), want: "pod2 remote2"},
				row{from: "client1", to: atPrimary(30080), want: "pod2"},
			)...)
			w.change("web", func(s *service) { s.endpoints = []endpoint{left("pod1"), left("remote1")} })
			w.check(overUDP(
				row{from: everyone, to: clusterIP(1, 80), want: "reject"},
				row{from: everyone, to: atPrimary(30080), want: "reject"},
			)...)
		}},
	}
}
