package conformance

import (
	"net/netip"

	"github.com/go-proxier/proxier/tracker"
)

// rangeWorlds returns worlds about ranges of ports. They run for data planes without ranges, too,
// and show that these lose nothing else. Every pod serves the ports 8080 and 8081 alone.
func rangeWorlds() []world {
	// Not among the endpoints.
	const others = "client1 remote3 pod3 node"
	return []world{
		{name: "SIP and RTP", needs: []Feature{UDP}, run: func(w cluster) {
			w.set(service{
				name: "phone", number: 1, kind: "LoadBalancer", externalIPs: true, loadBalancerIPs: true, endpoints: on("pod1", "remote1"),
				ports: []port{
					{name: "sip", protocol: udp, port: 5060},
					{name: "rtp", protocol: udp, port: 8000, last: 8100},
				},
			})
			for range 2 {
				w.check(
					row{"client1 node", udp, clusterIP(1, 5060), "pod1* remote1*"},
					row{"pod3", udp, clusterIP(1, 5060), "pod1 remote1"},
					row{others, udp, externalIP(1, 5060), "pod1* remote1*"})
				w.checkFor(PortRanges,
					row{"client1 node", udp, clusterIP(1, 8080), "pod1* remote1*"},
					row{"pod3", udp, clusterIP(1, 8081), "pod1:8081 remote1:8081"},
					row{"pod1", udp, clusterIP(1, 8080), "pod1* remote1"}, // hairpin
					row{others, udp, externalIP(1, 8081), "pod1:8081* remote1:8081*"},
					row{others, udp, loadBalancerIP(1, 8080), "pod1* remote1*"})
				w.checkFor(ClosedPorts, row{everyone, tcp, clusterIP(1, 8080), "reject"})
				w.resync()
			}
			w.checkFor(OtherPorts, row{everyone, udp, externalIP(1, 8101), "pass"}, row{everyone, udp, externalIP(1, 7999), "pass"})
			w.change("phone", func(s *service) { s.endpoints = on("pod2") })
			w.checkFor(PortRanges, row{others, udp, externalIP(1, 8080), "pod2*"}, row{"pod3", udp, clusterIP(1, 8080), "pod2"})
			w.change("phone", func(s *service) { s.endpoints = on("pod1", "pod2", "remote2") })
			w.checkFor(PortRanges, row{others, udp, externalIP(1, 8080), "pod1* pod2* remote2*"})
			w.change("phone", func(s *service) { s.endpoints = nil })
			w.checkFor(PortRanges,
				row{everyone, udp, externalIP(1, 8080), "reject"},
				row{everyone, udp, clusterIP(1, 8081), "reject"})
			w.remove("phone")
			w.check(row{"client1 pod3", udp, externalIP(1, 8080), "pass"}, row{"client1 pod3", udp, externalIP(1, 5060), "pass"})
		}},

		{name: "FTP in passive mode", run: func(w cluster) {
			w.set(service{
				name: "ftp", number: 1, kind: "LoadBalancer", loadBalancerIPs: true, externalLocal: true, affinity: 600,
				sources: []string{"192.0.2.10/32", "10.244.1.13/32", "2001:db8:1::a/128", "fd00:10:244:1::13/128"},
				ports: []port{
					{name: "control", port: 21},
					{name: "passive", port: 8070, last: 8090},
				},
				endpoints: on("pod1", "pod2", "remote1"),
			})
			lb, control := loadBalancerIP(1, 8080), loadBalancerIP(1, 21)
			w.checkFor(Affinity, row{"client1", tcp, control, "pod1 pod2"}, row{"pod3", tcp, clusterIP(1, 21), "pod1 pod2 remote1"})
			// One after the other, because a client's first connections must not run at the same time:
			// it keeps its endpoint for the whole range, at all addresses.
			w.checkFor(PortRanges,
				row{"client1", tcp, lb, "pod1 pod2"},
				row{"pod3", tcp, lb, "pod1 pod2 remote1"}) // internal
			w.checkFor(PortRanges, row{"client1", tcp, loadBalancerIP(1, 8081), "pod1:8081 pod2:8081"})
			w.checkFor(PortRanges, row{"client1 node", tcp, clusterIP(1, 8081), "pod1:8081* pod2:8081* remote1:8081*"})
			if w.does(PortRanges) {
				w.checkFor(SourceRanges, row{"client2 remote3 pod1", tcp, lb, "drop"}, row{"client2", tcp, control, "drop"})
			}
			w.change("ftp", func(s *service) { s.endpoints = on("remote1") })
			w.checkFor(PortRanges,
				row{"client1", tcp, lb, "drop"},
				row{"pod3", tcp, lb, "remote1"},
				row{"client1 node", tcp, clusterIP(1, 8080), "remote1*"})
			w.change("ftp", func(s *service) { s.sources, s.externalLocal = nil, false })
			w.checkFor(PortRanges, row{others, tcp, lb, "remote1*"})
			w.change("ftp", func(s *service) { s.affinity = 0 })
			w.checkFor(PortRanges, row{others, tcp, lb, "remote1*"})
		}},

		{name: "game servers", needs: []Feature{UDP}, run: func(w cluster) {
			whole := service{
				name: "whole", number: 1, externalIPs: true, endpoints: on("pod1"),
				ports: []port{{name: "udp", protocol: udp, port: 1, last: 65535}, {name: "tcp", port: 80}},
			}
			shifted := service{
				name: "shifted", number: 2, externalIPs: true, endpoints: on("pod1", "remote2"), internalLocal: true,
				ports: []port{{name: "up", protocol: udp, port: 1080, last: 1089, firstTarget: 8080}, {name: "down", protocol: udp, port: 30080, last: 30089, firstTarget: 8080}},
			}
			w.set(whole, shifted)
			w.check(row{others, tcp, externalIP(1, 80), "pod1*"})
			w.checkFor(PortRanges,
				row{others, udp, externalIP(1, 8080), "pod1*"},
				row{"pod3", udp, clusterIP(1, 8081), "pod1:8081"})
			w.checkFor(ClosedPorts, row{everyone, tcp, clusterIP(1, 81), "reject"})
			for _, first := range []int{1080, 30080} {
				w.checkFor(ShiftedPortRanges,
					row{others, udp, externalIP(2, first), "pod1* remote2*"},
					row{others, udp, externalIP(2, first+1), "pod1:8081* remote2:8081*"},
					row{"pod3", udp, clusterIP(2, first+1), "pod1:8081"})
			}
			w.change("shifted", func(s *service) {
				s.ports = []port{{name: "up", protocol: udp, port: 8080, last: 8089}, {name: "down", protocol: udp, port: 1080, last: 1089, firstTarget: 8080}}
			})
			w.checkFor(PortRanges, row{others, udp, externalIP(2, 8081), "pod1:8081* remote2:8081*"})
			w.checkFor(ShiftedPortRanges, row{others, udp, externalIP(2, 1081), "pod1:8081* remote2:8081*"})
			w.checkFor(OtherPorts, row{"client1 pod3", udp, externalIP(2, 30080), "pass"})
		}},

		{name: "range meets single ports", config: config{bound: []target{externalIP(1, 80)}}, run: func(w cluster) {
			w.set(
				service{name: "range", number: 1, created: 1000, externalIPs: true, endpoints: on("pod1"), ports: []port{{name: "p", port: 1, last: 65535}}},
				service{name: "single", number: 2, created: 2000, externalIPs: true, externalNumber: 1, ports: []port{{port: 8080}}, endpoints: on("pod2")},
				service{name: "node-port", number: 3, kind: "NodePort", ports: []port{{port: 80, nodePort: 30080}}, endpoints: on("remote1")},
				service{name: "thief", number: 4, externalIPs: true, externalAt: clusterIP, externalNumber: 1, ports: []port{{port: 8080}}, endpoints: on("remote2")})
			for range 2 {
				w.check(
					row{others, tcp, externalIP(1, 8080), "pod2*"},
					row{others, tcp, at("an address of the node", 30080, func(f tracker.Family) netip.Addr { return externalIP(1, 0).at(f).Addr() }), "remote1*"})
				w.checkFor(PortRanges,
					row{others, tcp, externalIP(1, 8081), "pod1:8081*"},
					row{"pod3", tcp, clusterIP(1, 8080), "pod1"},
					row{"pod3", tcp, clusterIP(1, 8081), "pod1:8081"})
				w.resync()
			}
			// A single port without endpoints keeps its packets.
			w.change("single", func(s *service) { s.endpoints = nil })
			w.check(row{everyone, tcp, externalIP(1, 8080), "reject"})
			w.remove("single")
			w.checkFor(PortRanges, row{others, tcp, externalIP(1, 8080), "pod1*"})
			w.change("range", func(s *service) { s.ports = []port{{name: "p", port: 1, last: 8080}} })
			w.checkFor(PortRanges, row{others, tcp, externalIP(1, 8080), "pod1*"}, row{everyone, tcp, externalIP(1, 8081), "pass"})
			w.change("range", func(s *service) { s.endpoints = nil })
			w.checkFor(PortRanges, row{everyone, tcp, externalIP(1, 8080), "reject"})
			w.remove("range")
			w.check(row{"pod3", tcp, clusterIP(1, 8080), "remote2*"})
		}},

		{name: "ranges move between services", run: func(w cluster) {
			set := func(name string, number int, first int32, last uint16, pod string) {
				w.set(service{name: name, number: number, externalIPs: true, externalNumber: 9, endpoints: on(pod), ports: []port{{name: "p", port: first, last: last}}})
			}
			to, to1 := externalIP(9, 8080), externalIP(9, 8081)
			set("a", 1, 8000, 8080, "pod1")
			set("b", 2, 8081, 8090, "pod2")
			w.checkFor(PortRanges, row{others, tcp, to, "pod1*"}, row{others, tcp, to1, "pod2:8081*"})
			// a grows into b, which keeps nothing there.
			set("a", 1, 8000, 8085, "pod1")
			w.checkFor(PortRanges, row{others, tcp, to, "pod1*"}, row{others, tcp, to1, "pod1:8081*"})
			set("a", 1, 8000, 8010, "pod1")
			w.checkFor(PortRanges, row{everyone, tcp, to, "pass"}, row{others, tcp, to1, "pod2:8081*"})
			// The same range.
			set("a", 1, 8081, 8090, "pod1")
			w.checkFor(PortRanges, row{others, tcp, to1, "pod1:8081*"})
			w.remove("a")
			w.checkFor(PortRanges, row{others, tcp, to1, "pod2:8081*"})
			set("b", 2, 8081, 0, "pod2")
			w.check(row{others, tcp, to1, "pod2*"})
			if w.does(Restart) {
				w.detach()
				w.attach()
			}
			set("b", 2, 8080, 8090, "pod2")
			w.checkFor(PortRanges, row{others, tcp, to, "pod2*"}, row{others, tcp, to1, "pod2:8081*"})
		}},

		{name: "packets to a range pass", config: config{elsewhere: []target{externalIP(1, 8080)}}, run: func(w cluster) {
			w.set(service{name: "web", number: 1, externalIPs: true, pass: true, ports: []port{{name: "p", port: 8000, last: 8100}}})
			const outside = "client1 pod1 pod3 node"
			w.checkFor(PortRanges, row{outside, tcp, externalIP(1, 8080), "pass"})
			w.change("web", func(s *service) { s.endpoints = on("pod1", "remote1") })
			w.checkFor(PortRanges, row{outside, tcp, externalIP(1, 8080), "pod1* remote1*"})
			w.change("web", func(s *service) { s.externalLocal, s.endpoints = true, on("remote1") })
			w.checkFor(PortRanges, row{"client1", tcp, externalIP(1, 8080), "pass"})
		}},
	}
}
