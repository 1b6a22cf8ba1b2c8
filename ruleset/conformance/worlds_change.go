package conformance

import v1 "k8s.io/api/core/v1"

// changeWorlds returns worlds about changes that must not affect other Services.
func changeWorlds() []world {
	return []world{
		{name: "full resync", run: func(w cluster) {
			rows := overUDP(
				row{from: "client1", to: clusterIP(1, 80), want: "pod1* remote1*"},
				row{from: "client1", to: atPrimary(30080), want: "pod1"},
				row{from: "pod3", to: externalIP(1, 80), want: "pod1 remote1"},
				row{from: "pod3", to: clusterIP(2, 80), want: "pod2"},
				row{from: "pod3", to: clusterIP(3, 80), want: "drop"},
				row{from: "client1", to: atPrimary(30081), want: "pass"},
			)
			w.set(
				service{name: "web", number: 1, kind: "NodePort", ports: tcpAndUDP(30080), externalLocal: true, externalIPs: true, endpoints: on("pod1", "remote1")},
				service{name: "other", number: 2, ports: tcpAndUDP(0), endpoints: on("pod2")},
				service{name: "gone", number: 3, kind: "NodePort", ports: tcpAndUDP(30081), endpoints: on("pod2")})
			w.Sync()
			w.remove("gone")
			w.resync()
			w.check(rows...)
			w.resync()
			w.check(rows...)
		}},

		{name: "restart", needs: []Feature{Restart}, run: func(w cluster) {
			w.set(
				service{name: "web", number: 1, kind: "NodePort", ports: tcpAndUDP(30080), endpoints: on("pod1", "remote1")},
				service{name: "gone", number: 2, kind: "NodePort", ports: tcpAndUDP(30081), endpoints: on("pod2")},
				service{name: "changed", number: 3, ports: tcpAndUDP(0), endpoints: on("pod2", "remote2")})
			w.Sync()
			to := w.targets([]v1.Protocol{tcp}, clusterIP(1, 80), atPrimary(30080))
			to = append(to, w.targets([]v1.Protocol{udp}, clusterIP(3, 80))...)
			w.undisturbed(to, func() {
				// Changes while the agent does not run.
				w.detach()
				w.remove("gone")
				w.change("changed", func(s *service) { s.endpoints = on("pod3", "remote2") })
				w.attach()
				w.Sync()
			})
			w.check(overUDP(
				row{from: "client1", to: clusterIP(1, 80), want: "pod1* remote1*"},
				row{from: "client1", to: atPrimary(30080), want: "pod1* remote1*"},
				row{from: "client1", to: atPrimary(30081), want: "pass"},
				row{from: "pod1", to: clusterIP(2, 80), want: "drop"},
				row{from: "pod1", to: clusterIP(3, 80), want: "pod3 remote2"},
			)...)
			w.remove("web")
			w.check(overUDP(row{from: "client1", to: atPrimary(30080), want: "pass"})...)
		}},
	}
}
