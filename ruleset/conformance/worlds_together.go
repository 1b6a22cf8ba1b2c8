package conformance

import (
	"fmt"
	"slices"
	"strings"
)

// togetherWorlds returns worlds about a Service with many features together. Each
// feature must work together with the others, and must be removable.
func togetherWorlds() []world {
	// The source ranges allow client1 and pod3 and exclude these hosts.
	const others = "client2 pod1 node"
	ranges := []string{"192.0.2.10/32", "10.244.1.13/32", "2001:db8:1::a/128", "fd00:10:244:1::13/128"}
	// wants holds the expected results at the frontends of a Service, by client.
	type wants struct {
		outside, nearby string // externally, for clients and for a local pod
		node            string // … and for the node
		cluster         string // by the cluster IP, for a client
		inside          string // … and for a local pod
	}
	// masqueraded marks every endpoint as seeing the node's address.
	masqueraded := func(pods string) string { return strings.ReplaceAll(pods+" ", " ", "* ") }
	// rows checks every frontend of the Service's two ports, one group per kind of
	// frontend: a client that connects to several at the same time may get two
	// affinities.
	rows := func(restricted bool, x wants) (groups [4][]row) {
		for i, proto := range tcpAndUDP(0) {
			port, nodePort, suffix := 80+i, 30080+i, ""
			if i == 1 {
				suffix = fmt.Sprint(":", podPort2)
			}
			add := func(group int, from string, to target, want string) {
				if suffix != "" && want != "drop" && want != "reject" {
					var words []string
					for w := range strings.FieldsSeq(want) {
						name, star := strings.CutSuffix(w, "*")
						w = name + suffix
						if star {
							w += "*"
						}
						words = append(words, w)
					}
					want = strings.Join(words, " ")
				}
				groups[group] = append(groups[group], row{from: from, proto: proto.protocol, to: to, want: want})
			}
			for g, to := range []target{atPrimary(nodePort), externalIP(1, port)} {
				add(g, "client1 client2", to, x.outside)
				add(g, "pod3", to, x.nearby)
				add(g, "node", to, x.node)
			}
			to := loadBalancerIP(1, port)
			add(2, "client1", to, x.outside)
			add(2, "pod3", to, x.nearby)
			if restricted {
				add(2, others, to, "drop")
			} else {
				add(2, "client2", to, x.outside)
				add(2, "node", to, x.node)
			}
			add(3, "client1 node", clusterIP(1, port), x.cluster)
			add(3, "pod3", clusterIP(1, port), x.inside)
		}
		return groups
	}
	return []world{
		{name: "everything together", needs: []Feature{Affinity, SourceRanges}, config: config{clients: affinityClients}, run: func(w cluster) {
			const all, local = "pod1 pod2 remote1 remote2", "pod1 pod2"
			w.set(
				service{
					name: "web", number: 1, kind: "LoadBalancer", externalLocal: true, affinity: 10800,
					ports: []port{
						{name: "a", protocol: tcp, port: 80, nodePort: 30080, target: podPort},
						{name: "b", protocol: udp, port: 81, nodePort: 30081, target: podPort2},
					},
					externalIPs: true, loadBalancerIPs: true, sources: ranges,
					endpoints: on("pod1", "pod2", "remote1", "remote2"),
				},
				service{
					name: "bystander", number: 2, kind: "LoadBalancer", externalLocal: true, affinity: 10800,
					ports: tcpAndUDP(30090), loadBalancerIPs: true, sources: ranges, endpoints: on("pod2", "remote2"),
				})
			// The other Service must not be affected by changes of this one.
			bystander := [][]row{
				overUDP(row{from: "pod3", to: atPrimary(30090), want: "pod2 remote2"}),
				{},
				overUDP(row{from: "client1", to: loadBalancerIP(2, 80), want: "pod2"},
					row{from: "client2", to: loadBalancerIP(2, 80), want: "drop"}),
				overUDP(row{from: "client2", to: clusterIP(2, 80), want: "pod2* remote2*"}),
			}
			check := func(restricted bool, x wants) {
				groups := rows(restricted, x)
				if x.cluster == "reject" { // there is no affinity
					w.check(slices.Concat(groups[:]...)...)
					return
				}
				for g, rows := range groups {
					w.check(append(rows, bystander[g]...)...)
				}
			}
			first := wants{outside: local, nearby: all, node: masqueraded(all), cluster: masqueraded(all), inside: all}
			check(true, first)

			// Changes of another Service, and changes that do not affect endpoints, move no client.
			before := w.chosen(tcp, atPrimary(30080))
			w.change("bystander", func(s *service) { s.affinity = 600 })
			w.same("though only another service changed", before, w.chosen(tcp, atPrimary(30080)))
			w.change("web", func(s *service) { s.sources = s.sources[:3] })
			w.same("though only source ranges changed", before, w.chosen(tcp, atPrimary(30080)))
			w.resync()
			w.same("by a full resync", before, w.chosen(tcp, atPrimary(30080)))
			w.change("web", func(s *service) { s.sources = ranges })
			check(true, first)

			// The endpoints move to other nodes, and one moves back.
			w.change("web", func(s *service) { s.endpoints = on("remote1", "remote2") })
			far := "remote1 remote2"
			check(true, wants{outside: "drop", nearby: far, node: masqueraded(far), cluster: masqueraded(far), inside: far})
			w.change("web", func(s *service) { s.endpoints = on("pod2", "remote3") })
			mixed := "pod2 remote3"
			check(true, wants{outside: "pod2", nearby: mixed, node: masqueraded(mixed), cluster: masqueraded(mixed), inside: mixed})

			// The policies and the endpoints change together.
			w.change("web", func(s *service) { s.externalLocal = false })
			star := masqueraded(mixed)
			check(true, wants{outside: star, nearby: star, node: star, cluster: star, inside: mixed})
			w.change("web", func(s *service) {
				s.externalLocal, s.internalLocal, s.endpoints = true, true, on("pod1", "pod2", "remote1", "remote2")
			})
			check(true, wants{outside: local, nearby: all, node: masqueraded(all), cluster: masqueraded(local), inside: local})

			// Affinity is removed, with the policies and without them.
			w.change("web", func(s *service) { s.affinity = 0 })
			check(true, wants{outside: local, nearby: all, node: masqueraded(all), cluster: masqueraded(local), inside: local})
			w.change("web", func(s *service) { s.affinity, s.endpoints = 60, on("pod2", "remote3") })
			check(true, wants{outside: "pod2", nearby: mixed, node: star, cluster: "pod2*", inside: "pod2"})
			w.change("web", func(s *service) {
				s.affinity, s.externalLocal, s.internalLocal, s.sources = 0, false, false, nil
			})
			check(false, wants{outside: star, nearby: star, node: star, cluster: star, inside: mixed})

			// All endpoints are removed and added again.
			w.change("web", func(s *service) { s.endpoints = nil })
			check(false, wants{outside: "reject", nearby: "reject", node: "reject", cluster: "reject", inside: "reject"})
			w.change("web", func(s *service) {
				s.affinity, s.externalLocal, s.sources, s.endpoints = 10800, true, ranges, on("pod1", "pod2", "remote1", "remote2")
			})
			check(true, first)
			w.remove("web")
			w.check(append(bystander[2],
				row{from: "client1", proto: tcp, to: atPrimary(30080), want: "pass"},
				row{from: "pod3", proto: tcp, to: clusterIP(1, 80), want: "drop"})...)
		}},
	}
}
