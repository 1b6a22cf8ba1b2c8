package conformance

import v1 "k8s.io/api/core/v1"

// externalWorlds returns worlds about external and load-balancer IPs.
func externalWorlds() []world {
	return []world{
		{name: "external IP", run: func(w cluster) {
			w.set(service{name: "web", number: 1, ports: tcpAndUDP(0), externalIPs: true, endpoints: on("pod1", "remote1")})
			w.check(overUDP(
				row{from: everyone, to: externalIP(1, 80), want: "pod1* remote1*"},
				row{from: "pod3", to: clusterIP(1, 80), want: "pod1 remote1"},
			)...)
			// An external IP may belong to a real host: other ports are not affected.
			w.checkFor(OtherPorts, overUDP(row{from: everyone, to: externalIP(1, 81), want: "pass"})...)
			w.change("web", func(s *service) { s.externalIPs = false })
			w.check(overUDP(
				row{from: everyone, to: externalIP(1, 80), want: "pass"},
				row{from: "pod3", to: clusterIP(1, 80), want: "pod1 remote1"},
			)...)
		}},

		{
			name: "external and load-balancer IPs of the node", config: config{bound: []target{externalIP(1, 80), loadBalancerIP(1, 80)}},
			run: func(w cluster) {
				web := service{name: "web", number: 1, kind: "LoadBalancer", ports: tcpAndUDP(0), externalIPs: true, loadBalancerIPs: true}
				w.set(web)
				for _, to := range []target{externalIP(1, 80), loadBalancerIP(1, 80)} {
					w.check(overUDP(row{from: everyone, to: to, want: "reject"})...)
				}
				// Restrict the sources.
				w.change("web", func(s *service) { s.sources = []string{"192.0.2.0/24", "2001:db8:1::/64"} })
				w.checkFor(RefuseBySource, overUDP(
					row{from: "client1 node", to: loadBalancerIP(1, 80), want: "reject"},
					row{from: "pod1 remote3", to: loadBalancerIP(1, 80), want: "drop"})...)
				w.change("web", func(s *service) { s.sources, s.endpoints = nil, on("pod1", "remote1") })
				for _, to := range []target{externalIP(1, 80), loadBalancerIP(1, 80)} {
					w.check(overUDP(row{from: everyone, to: to, want: "pod1* remote1*"})...)
				}
			},
		},

		{name: "external IP of two services", run: func(w cluster) {
			// Different ports of one address, then the same port.
			w.set(
				service{name: "a", number: 1, externalIPs: true, ports: []port{{port: 80}}, endpoints: on("pod1")},
				service{name: "b", number: 2, externalIPs: true, externalNumber: 1, ports: []port{{port: 81}}, endpoints: on("pod2")})
			w.check(
				row{everyone, tcp, externalIP(1, 80), "pod1*"},
				row{everyone, tcp, externalIP(1, 81), "pod2*"})
			w.change("b", func(s *service) { s.ports = []port{{port: 80}} })
			w.check(
				row{everyone, tcp, externalIP(1, 80), "pod1*"},
				row{"pod3", tcp, clusterIP(2, 80), "pod2"})
			w.checkFor(OtherPorts, row{everyone, tcp, externalIP(1, 81), "pass"})
			w.remove("a")
			w.check(row{everyone, tcp, externalIP(1, 80), "pod2*"})
			w.set(service{name: "a", number: 1, externalIPs: true, endpoints: on("pod1")})
			w.check(row{everyone, tcp, externalIP(1, 80), "pod1*"})
		}},

		{name: "oldest service keeps an address", run: func(w cluster) {
			// The names sort against the ages.
			a := service{name: "a", number: 1, created: 3000, externalIPs: true, externalNumber: 9, endpoints: on("pod1")}
			b := service{name: "b", number: 2, created: 2000, externalIPs: true, externalNumber: 9, endpoints: on("pod2")}
			has := func(pod string) {
				w.check(row{everyone, tcp, externalIP(9, 80), pod + "*"})
			}
			w.set(b)
			has("pod2")
			w.set(a)
			has("pod2")
			w.resync()
			has("pod2")
			w.remove("b")
			has("pod1")
			w.set(b)
			has("pod2")
			// A recreated Service is young.
			w.remove("b")
			b.created = 4000
			w.set(b)
			has("pod1")
			w.set(service{name: "c", number: 3, externalIPs: true, externalNumber: 9, endpoints: on("pod3")}) // of unknown age
			has("pod1")
			w.remove("a")
			has("pod2")
			w.check(row{"client1", tcp, clusterIP(2, 80), "pod2*"}, row{"client1", tcp, clusterIP(3, 80), "pod3*"})
		}},

		{name: "external IP takes no load-balancer IP", run: func(w cluster) {
			w.set(service{name: "b", number: 2, created: 2000, kind: "LoadBalancer", loadBalancerIPs: true, endpoints: on("pod2")})
			w.check(row{everyone, tcp, loadBalancerIP(2, 80), "pod2*"})
			// The older Service has another port of the address, then the same.
			w.set(service{
				name: "a", number: 1, created: 1000, externalIPs: true, externalAt: loadBalancerIP, externalNumber: 2,
				ports: []port{{port: 81}}, endpoints: on("pod1"),
			})
			w.check(
				row{everyone, tcp, loadBalancerIP(2, 80), "pod2*"},
				row{everyone, tcp, loadBalancerIP(2, 81), "pod1*"})
			w.change("a", func(s *service) { s.ports = []port{{port: 80}} })
			w.check(
				row{everyone, tcp, loadBalancerIP(2, 80), "pod2*"},
				row{"client1", tcp, clusterIP(1, 80), "pod1*"})
			w.change("b", func(s *service) { s.endpoints = nil })
			w.check(row{everyone, tcp, loadBalancerIP(2, 80), "reject"})
			w.change("b", func(s *service) { s.loadBalancerIPs = false })
			w.check(row{everyone, tcp, loadBalancerIP(2, 80), "pod1*"})
			w.change("b", func(s *service) { s.loadBalancerIPs, s.endpoints = true, on("pod2") })
			w.check(row{everyone, tcp, loadBalancerIP(2, 80), "pod2*"})
		}},

		{name: "frontends move between services", run: func(w cluster) {
			pods := map[string]string{"a": "pod1", "b": "pod2", "c": "pod3"}
			// hold sets the Services so that each has the external IP and the
			// NodePort of the given number, or none for 0.
			hold := func(a, b, c int) {
				var rows []row
				for i, name := range []string{"a", "b", "c"} {
					s := service{name: name, number: i + 1, kind: "NodePort", endpoints: on(pods[name])}
					if n := []int{a, b, c}[i]; n != 0 {
						s.externalIPs, s.externalNumber, s.ports = true, n+10, []port{{nodePort: int32(30080 + n)}}
						rows = append(rows,
							row{everyone, tcp, externalIP(n+10, 80), pods[name] + "*"},
							row{everyone, tcp, atPrimary(30080 + n), pods[name] + "*"})
					}
					w.set(s)
					rows = append(rows, row{"client1", tcp, clusterIP(i+1, 80), pods[name] + "*"})
				}
				w.check(rows...)
			}
			hold(1, 0, 0)
			hold(0, 1, 0) // from one Service to another
			hold(1, 2, 0)
			hold(2, 1, 0) // two Services exchange theirs
			hold(2, 1, 3)
			hold(1, 3, 2) // in a circle
			hold(0, 1, 3) // a chain
			// The owner is deleted, and the other Service gets the frontends.
			w.remove("a")
			w.change("c", func(s *service) { s.externalNumber = 11 })
			w.check(row{"client1", tcp, externalIP(11, 80), "pod2*"})
			w.remove("b")
			w.check(row{"client1", tcp, externalIP(11, 80), "pod3*"})
		}},

		{name: "load-balancer IP", run: func(w cluster) {
			w.set(service{name: "web", number: 1, kind: "LoadBalancer", ports: tcpAndUDP(30080), loadBalancerIPs: true, endpoints: on("pod1", "remote1")})
			w.check(overUDP(
				row{from: everyone, to: loadBalancerIP(1, 80), want: "pod1* remote1*"},
				row{from: everyone, to: atPrimary(30080), want: "pod1* remote1*"},
				row{from: "pod3", to: clusterIP(1, 80), want: "pod1 remote1"},
			)...)
			w.checkFor(OtherPorts, overUDP(row{from: everyone, to: loadBalancerIP(1, 30080), want: "pass"})...)
			// Packets to a load balancer that is a proxy must reach the proxy itself.
			w.change("web", func(s *service) { s.ipMode = v1.LoadBalancerIPModeProxy })
			w.check(overUDP(
				row{from: everyone, to: loadBalancerIP(1, 80), want: "pass"},
				row{from: everyone, to: atPrimary(30080), want: "pod1* remote1*"},
			)...)
			w.change("web", func(s *service) { s.ipMode = v1.LoadBalancerIPModeVIP })
			w.check(overUDP(row{from: everyone, to: loadBalancerIP(1, 80), want: "pod1* remote1*"})...)
		}},

		{name: "source ranges", needs: []Feature{SourceRanges}, run: func(w cluster) {
			to := loadBalancerIP(1, 80)
			unrestricted := overUDP(
				row{from: everyone, to: atPrimary(30080), want: "pod1* remote1*"},
				row{from: everyone, to: externalIP(1, 80), want: "pod1* remote1*"},
				row{from: "pod3", to: clusterIP(1, 80), want: "pod1 remote1"})
			w.set(service{
				name: "web", number: 1, kind: "LoadBalancer", ports: tcpAndUDP(30080),
				loadBalancerIPs: true, externalIPs: true, endpoints: on("pod1", "remote1"),
				sources: []string{"192.0.2.10/32", " 198.51.0.0/16 ", "2001:db8:1::a/128", "2001:db8:77::/48"},
			})
			w.check(overUDP(
				row{from: "client1", to: to, want: "pod1* remote1*"},
				row{from: "client2 client3 remote3 pod1 pod3 node", to: to, want: "drop"},
			)...)
			w.check(unrestricted...)

			// Allow the node's address and its network.
			w.change("web", func(s *service) { s.sources = []string{"192.0.2.0/24", "2001:db8:1::/64"} })
			w.check(overUDP(
				row{from: "client1 client2 node", to: to, want: "pod1* remote1*"},
				row{from: "remote3 pod1 pod3", to: to, want: "drop"},
			)...)

			// Pods, and overlapping ranges.
			w.change("web", func(s *service) {
				s.sources = []string{"10.244.0.0/16", "10.244.1.0/24", "10.244.1.11/32", "fd00:10:244::/48", "fd00:10:244:1::/64"}
			})
			w.check(overUDP(
				row{from: "client1 client2 node", to: to, want: "drop"},
				row{from: "remote3 pod1 pod3", to: to, want: "pod1* remote1*"},
			)...)
			w.check(unrestricted...)

			// Sources that are not allowed get no reply even without endpoints.
			w.change("web", func(s *service) {
				s.sources, s.endpoints = []string{"192.0.2.10/32", "2001:db8:1::a/128"}, nil
			})
			w.checkFor(RefuseBySource, overUDP(
				row{from: "client1", to: to, want: "reject"},
				row{from: "client2 pod1 node", to: to, want: "drop"},
			)...)

			for _, open := range [][]string{{"192.0.2.10/32", "0.0.0.0/0", "::/0"}, nil} {
				w.change("web", func(s *service) {
					s.sources, s.endpoints = []string{"192.0.2.99/32", "2001:db8:1::99/128"}, on("pod1", "remote1")
				})
				w.check(overUDP(row{from: everyone, to: to, want: "drop"})...)
				w.change("web", func(s *service) { s.sources = open })
				w.check(overUDP(row{from: everyone + " client2", to: to, want: "pod1* remote1*"})...)
			}
		}},

		{name: "service type changes", run: func(w cluster) {
			s := service{name: "web", number: 1, ports: tcpAndUDP(0), endpoints: on("pod1", "remote1")}
			for _, step := range []struct {
				kind                   v1.ServiceType
				nodePort, loadBalancer bool
			}{
				{v1.ServiceTypeClusterIP, false, false},
				{v1.ServiceTypeNodePort, true, false},
				{v1.ServiceTypeLoadBalancer, true, true},
				{v1.ServiceTypeLoadBalancer, false, true}, // allocateLoadBalancerNodePorts: false
				{v1.ServiceTypeNodePort, true, false},
				{v1.ServiceTypeClusterIP, false, false},
			} {
				np, lb := "pass", "pass"
				s.kind, s.loadBalancerIPs, s.ports = step.kind, step.loadBalancer, tcpAndUDP(0)
				if step.nodePort {
					np, s.ports = "pod1* remote1*", tcpAndUDP(30080)
				}
				if step.loadBalancer {
					lb = "pod1* remote1*"
				}
				w.set(s)
				w.check(overUDP(
					row{from: "pod3", to: clusterIP(1, 80), want: "pod1 remote1"},
					row{from: "client1 pod3 node", to: atPrimary(30080), want: np},
					row{from: "client1 pod3 node", to: loadBalancerIP(1, 80), want: lb},
				)...)
			}
			// Another cluster IP, as after a Service is deleted and created again.
			s.number = 2
			w.set(s)
			w.check(overUDP(row{from: "pod3", to: clusterIP(2, 80), want: "pod1 remote1"})...)
			s.kind = v1.ServiceTypeExternalName
			w.set(s)
			w.setServiceCIDRs(nil)
			w.check(overUDP(row{from: "pod3 client1", to: clusterIP(2, 80), want: "pass"})...)
		}},
	}
}
