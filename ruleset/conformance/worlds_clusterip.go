package conformance

import (
	"fmt"
	"strings"
)

// clusterIPWorlds returns worlds about cluster IPs.
func clusterIPWorlds() []world {
	return []world{
		{name: "cluster IP", run: func(w cluster) {
			w.set(service{name: "web", number: 1, ports: tcpAndUDP(0), endpoints: on("pod1", "pod2", "remote1")})
			w.check(overUDP(
				// Clients that are not recognized as local pods get their replies through the node.
				row{from: "client1 remote2 remote1 node", to: clusterIP(1, 80), want: "pod1* pod2* remote1*"},
				row{from: "pod3", to: clusterIP(1, 80), want: "pod1 pod2 remote1"},
				// Hairpin: a pod connects to itself.
				row{from: "pod1", to: clusterIP(1, 80), want: "pod1* pod2 remote1"},
				row{from: "pod2", to: clusterIP(1, 80), want: "pod1 pod2* remote1"},
				// Packets that are not for a Service pass.
				row{from: everyone, to: atPod(2, podPort), want: "pass"},
				row{from: everyone, to: atPrimary(nodePortOwn), want: "pass"},
				row{from: everyone, to: atSecondary(nodePortOwn), want: "pass"},
				row{from: everyone, to: atPrimary(80), want: "pass"},
			)...)
		}},

		{name: "cluster IP over SCTP", needs: []Feature{SCTP}, config: config{sctp: true}, run: func(w cluster) {
			w.set(
				service{
					name: "web", number: 1, kind: "NodePort",
					ports:     []port{{name: "sctp", protocol: sctp, nodePort: 30080}},
					endpoints: on("pod1", "remote1"),
				},
				service{name: "empty", number: 2, kind: "NodePort", ports: []port{{protocol: sctp, nodePort: 30081}}})
			w.check(
				row{"client1 remote2 node", sctp, clusterIP(1, 80), "pod1* remote1*"},
				row{"pod3", sctp, clusterIP(1, 80), "pod1 remote1"},
				row{"pod1", sctp, clusterIP(1, 80), "pod1* remote1"},
				row{"client1 pod3 node", sctp, atPrimary(30080), "pod1* remote1*"},
				row{"client1 pod3 node", sctp, clusterIP(2, 80), "reject"},
				row{"client1 pod3 node", sctp, atPrimary(30081), "reject"},
			)
			w.change("web", func(s *service) { s.endpoints = on("remote1") })
			w.check(
				row{"client1", sctp, clusterIP(1, 80), "remote1*"},
				row{"pod3", sctp, clusterIP(1, 80), "remote1"},
			)
		}},

		{name: "several ports", run: func(w cluster) {
			w.set(service{name: "web", number: 1, endpoints: on("pod1", "remote1"), ports: []port{
				{name: "http", port: 80},
				{name: "alt", port: 443, target: podPort2},
				{name: "dns", port: 53, protocol: udp},
				// The same number over another protocol is another port.
				{name: "dns-tcp", port: 53, protocol: tcp, target: podPort2},
			}})
			w.check(
				row{"client1", tcp, clusterIP(1, 80), "pod1* remote1*"},
				row{"client1", tcp, clusterIP(1, 443), "pod1:8081* remote1:8081*"},
				row{"client1", udp, clusterIP(1, 53), "pod1* remote1*"},
				row{"pod3", udp, clusterIP(1, 53), "pod1 remote1"},
				row{"pod3", tcp, clusterIP(1, 53), "pod1:8081 remote1:8081"},
			)
			// One port moves, one is removed, and one gets another target.
			w.change("web", func(s *service) {
				s.ports = []port{
					{name: "http", protocol: tcp, port: 8000, target: podPort},
					{name: "dns", port: 53, protocol: udp, target: podPort2},
				}
			})
			w.check(
				row{"client1", tcp, clusterIP(1, 8000), "pod1* remote1*"},
				row{"client1", udp, clusterIP(1, 53), "pod1:8081* remote1:8081*"},
			)
		}},

		{name: "many ports", run: func(w cluster) {
			const n = 20
			s := service{name: "web", number: 1, endpoints: on("pod1", "remote1")}
			var rows []row
			for i := range int32(n) {
				p := port{name: fmt.Sprint("p", i), port: 1000 + i, target: podPort + i%2}
				pods := "pod1 remote1"
				if i%2 == 1 {
					pods = "pod1:8081 remote1:8081"
				}
				s.ports = append(s.ports, p)
				rows = append(rows, row{"pod3", tcp, clusterIP(1, int(p.port)), pods})
			}
			w.set(s)
			w.check(rows...)
			w.change("web", func(s *service) { s.ports = s.ports[:n/2] })
			w.check(rows[:n/2]...)
		}},

		{name: "no endpoints", run: func(w cluster) {
			w.set(
				service{name: "web", number: 1, kind: "LoadBalancer", ports: tcpAndUDP(30080), externalIPs: true, loadBalancerIPs: true},
				service{name: "other", number: 2, ports: tcpAndUDP(0), endpoints: on("pod1")})
			everywhere := func(want string) []row {
				return overUDP(
					row{from: everyone, to: clusterIP(1, 80), want: want},
					row{from: everyone, to: externalIP(1, 80), want: want},
					row{from: everyone, to: loadBalancerIP(1, 80), want: want},
					row{from: everyone, to: atPrimary(30080), want: want},
					row{from: everyone, to: atSecondary(30080), want: want},
					row{from: everyone, to: atGateway(30080), want: want},
				)
			}
			w.check(everywhere("reject")...)

			w.change("web", func(s *service) { s.endpoints = []endpoint{{pod: "pod2", unready: true}} })
			w.check(everywhere("reject")...)

			w.change("web", func(s *service) { s.endpoints = on("pod2") })
			w.check(overUDP(
				row{from: "client1 node", to: clusterIP(1, 80), want: "pod2*"},
				row{from: "pod1 pod3", to: clusterIP(1, 80), want: "pod2"},
				row{from: everyone, to: externalIP(1, 80), want: "pod2*"},
				row{from: everyone, to: loadBalancerIP(1, 80), want: "pod2*"},
				row{from: everyone, to: atPrimary(30080), want: "pod2*"},
			)...)

			w.change("web", func(s *service) { s.endpoints = nil })
			w.check(everywhere("reject")...)
			w.check(overUDP(row{from: "client1", to: clusterIP(2, 80), want: "pod1*"})...)
		}},

		{name: "closed ports", needs: []Feature{ClosedPorts}, run: func(w cluster) {
			w.set(
				service{name: "web", number: 1, ports: []port{{protocol: tcp}}, endpoints: on("pod1")},
				service{name: "empty", number: 2})
			w.check(overUDP(
				row{from: everyone, to: clusterIP(1, 81), want: "reject"},
				row{from: everyone, to: clusterIP(2, 81), want: "reject"},
			)...)
			w.check(row{everyone, udp, clusterIP(1, 80), "reject"})
			w.change("web", func(s *service) { s.ports[0].port = 81 })
			w.check(
				row{everyone, tcp, clusterIP(1, 80), "reject"},
				row{"pod3", tcp, clusterIP(1, 81), "pod1"})
		}},

		{
			name: "cluster IPs of the node", needs: []Feature{ClosedPorts}, config: config{bound: []target{clusterIP(1, 80), clusterIP(2, 80)}},
			run: func(w cluster) {
				w.set(
					service{name: "web", number: 1, ports: tcpAndUDP(0), endpoints: on("pod1", "remote1")},
					service{name: "other", number: 3, ports: tcpAndUDP(0), endpoints: on("pod2")})
				w.check(overUDP(
					row{from: "pod3", to: clusterIP(1, 80), want: "pod1 remote1"},
					row{from: "client1 node", to: clusterIP(1, 80), want: "pod1* remote1*"},
					row{from: everyone, to: clusterIP(1, 81), want: "pass"},
					row{from: everyone, to: clusterIP(2, 80), want: "pass"},
					row{from: everyone, to: clusterIP(3, 81), want: "reject"},
				)...)
				w.change("web", func(s *service) { s.endpoints = nil })
				w.check(overUDP(
					row{from: everyone, to: clusterIP(1, 80), want: "reject"},
					row{from: everyone, to: clusterIP(1, 81), want: "pass"},
				)...)
			},
		},

		{name: "service CIDR", needs: []Feature{ServiceCIDRs}, run: func(w cluster) {
			w.set(
				service{name: "web", number: 1, ports: tcpAndUDP(0), endpoints: on("pod1")},
				service{name: "gone", number: 2, ports: tcpAndUDP(0), endpoints: on("pod1")})
			w.check(overUDP(
				row{from: everyone, to: clusterIP(99, 80), want: "drop"},
				row{from: "pod3", to: clusterIP(2, 80), want: "pod1"},
			)...)
			w.remove("gone")
			w.check(overUDP(
				row{from: everyone, to: clusterIP(2, 80), want: "drop"},
				row{from: "pod3", to: clusterIP(1, 80), want: "pod1"},
			)...)
			w.setServiceCIDRs(nil)
			w.check(overUDP(
				row{from: everyone, to: clusterIP(2, 80), want: "pass"},
				row{from: "pod3", to: clusterIP(1, 80), want: "pod1"},
			)...)
		}},

		{name: "numbers of endpoints", config: config{remotePods: manyPods}, run: func(w cluster) {
			for _, n := range []int{1, 2, 3, 8, 9, 16, 17, 18, manyPods, 19, 15, 4, 1} {
				pods := remotes(n)
				w.set(service{name: "web", number: 1, ports: tcpAndUDP(0), endpoints: on(pods...)})
				w.check(row{"pod3", udp, clusterIP(1, 80), strings.Join(pods, " ")})
			}
		}},
	}
}

// manyPods is more than any number of endpoints that data planes may handle
// specially.
const manyPods = 23

// remotes returns the names of the first n remote pods.
func remotes(n int) (names []string) {
	for i := range n {
		names = append(names, fmt.Sprint(remoteName, i+1))
	}
	return names
}

// equally returns a weight of 1 for each pod.
func equally(pods []string) map[string]int {
	out := map[string]int{}
	for _, p := range pods {
		out[p] = 1
	}
	return out
}
