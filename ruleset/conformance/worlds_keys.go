package conformance

import "github.com/go-proxier/proxier/tracker"

// keyWorlds returns worlds in which keys of frontends, pools and endpoints differ in one part
// alone. A table whose key lacks the part mixes up what must be apart.
func keyWorlds() []world {
	// twoPorts returns a Service with two ports.
	twoPorts := func(a, b port) service {
		return service{name: "web", number: 1, kind: "NodePort", externalIPs: true, ports: []port{a, b}, endpoints: on("pod1", "remote1")}
	}
	// coexist checks two ports together, each alone, and again together. The second target of
	// each pod tells the ports apart. one and two are their protocols and numbers.
	coexist := func(w cluster, one, two port) {
		rows := func(p port, suffix string) []row {
			pods := "pod1" + suffix + "* remote1" + suffix + "*"
			return []row{
				{"client1 node", p.protocol, clusterIP(1, int(p.port)), pods},
				{"client1 pod3", p.protocol, atPrimary(int(p.nodePort)), pods},
				{"client1", p.protocol, externalIP(1, int(p.port)), pods},
			}
		}
		first, second := rows(one, ""), rows(two, ":8081")
		w.set(twoPorts(one, two))
		w.check(append(first, second...)...)
		for _, alone := range []struct {
			port port
			rows []row
		}{{one, first}, {two, second}} {
			w.change("web", func(s *service) { s.ports = []port{alone.port} })
			w.check(alone.rows...)
			w.set(twoPorts(one, two))
			w.check(append(first, second...)...)
		}
		// Only the first port has endpoints.
		w.set(
			service{name: "web", number: 1, kind: "NodePort", externalIPs: true, ports: []port{one}, endpoints: on("pod1", "remote1")},
			service{name: "other", number: 2, kind: "NodePort", ports: []port{two}})
		w.check(append(first, row{"client1 pod3", two.protocol, atPrimary(int(two.nodePort)), "reject"})...)
	}
	return []world{
		{name: "keys that differ in the protocol", run: func(w cluster) {
			coexist(w,
				port{name: "a", protocol: tcp, port: 80, nodePort: 30080, target: podPort},
				port{name: "b", protocol: udp, port: 80, nodePort: 30080, target: podPort2})
		}},

		{name: "keys that differ in the port", run: func(w cluster) {
			coexist(w,
				port{name: "a", protocol: tcp, port: 80, nodePort: 30080, target: podPort},
				port{name: "b", protocol: tcp, port: 81, nodePort: 30081, target: podPort2})
		}},

		{name: "keys of endpoints that differ in the protocol", run: func(w cluster) {
			// Each Service has the endpoints that the other loses.
			has := func(name string, number int, p port, pods ...string) service {
				return service{name: name, number: number, ports: []port{p}, endpoints: on(pods...)}
			}
			a, b := port{protocol: tcp}, port{protocol: udp}
			w.set(has("a", 1, a, "pod1", "remote1"), has("b", 2, b, "pod1", "remote1"))
			rows := []row{{"pod3", tcp, clusterIP(1, 80), "pod1 remote1"}, {"pod3", udp, clusterIP(2, 80), "pod1 remote1"}}
			w.check(rows...)
			w.set(has("b", 2, b, "pod2"))
			w.check(rows[0], row{"pod3", udp, clusterIP(2, 80), "pod2"})
			w.remove("b")
			w.check(rows[0])
			w.set(has("b", 2, b, "pod1", "remote1"))
			w.remove("a")
			w.check(rows[1])
		}},

		{name: "port names that move to another protocol", run: func(w cluster) {
			// The key of the port differs in its protocol from that of the port that it
			// replaces in the same delta.
			s := service{name: "web", number: 1, kind: "NodePort", endpoints: on("pod1", "remote1")}
			for i := range 4 {
				p, other := tcp, udp
				if i%2 == 1 {
					p, other = udp, tcp
				}
				s.ports = []port{{name: "a", protocol: p, nodePort: 30080}, {name: "b", protocol: other, port: 80, nodePort: 30080, target: podPort2}}
				w.set(s)
				w.check(
					row{"client1 node", p, clusterIP(1, 80), "pod1* remote1*"},
					row{"client1 node", other, clusterIP(1, 80), "pod1:8081* remote1:8081*"},
					row{"client1", p, atPrimary(30080), "pod1* remote1*"})
			}
		}},

		{name: "keys that differ in the family", run: func(w cluster) {
			// Either family, but not both, has endpoints.
			for _, with := range w.families() {
				w.set(service{
					name: "web", number: 1, kind: "NodePort", ports: tcpAndUDP(30080),
					endpoints: on("pod1", "remote1"), endpointsIn: []tracker.Family{with},
				})
				for _, f := range w.families() {
					pods, want := "pod1* remote1*", "pod1 remote1"
					if f != with {
						pods, want = "reject", "reject"
					}
					w.check(overUDP(
						row{from: "client1 node", to: in(f, atPrimary(30080)), want: pods},
						row{from: "pod3", to: in(f, clusterIP(1, 80)), want: want})...)
				}
			}
		}},

		{name: "keys that differ in the pool", run: func(w cluster) {
			s := service{name: "web", number: 1, kind: "NodePort", ports: tcpAndUDP(30080), externalLocal: true, endpoints: on("pod1", "remote1")}
			check := func(internal, external string) {
				w.check(overUDP(
					row{from: "pod3", to: clusterIP(1, 80), want: internal},
					row{from: "client1", to: atPrimary(30080), want: external})...)
			}
			w.set(s)
			check("pod1 remote1", "pod1")
			w.change("web", func(s *service) { s.endpoints = on("pod2", "remote1") })
			check("pod2 remote1", "pod2")
			w.change("web", func(s *service) { s.internalLocal, s.externalLocal = true, false })
			check("pod2", "pod2* remote1*")
			w.change("web", func(s *service) { s.endpoints = on("pod1", "remote2") })
			check("pod1", "pod1* remote2*")
		}},
	}
}
