package conformance

import (
	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/tracker"
)

// masqueradeWorlds returns worlds about which source addresses are replaced, and
// about recognizing pod traffic.
func masqueradeWorlds() []world {
	var cidrs ruleset.LocalTraffic
	for _, f := range []tracker.Family{tracker.IPv4, tracker.IPv6} {
		cidrs.CIDRs = append(cidrs.CIDRs, allPodsCIDR(f))
	}
	start := func(w cluster) {
		w.set(
			service{name: "web", number: 1, ports: tcpAndUDP(0), endpoints: on("pod1", "remote1")},
			service{name: "local", number: 2, kind: "NodePort", ports: tcpAndUDP(30080), externalLocal: true, endpoints: on("pod1", "remote1")})
	}
	// detected is the expected behavior when the plane can distinguish local pods.
	detected := func(w cluster) {
		start(w)
		w.check(overUDP(
			row{from: "client1 remote3 node", to: clusterIP(1, 80), want: "pod1* remote1*"},
			row{from: "pod3", to: clusterIP(1, 80), want: "pod1 remote1"},
			row{from: "pod1", to: clusterIP(1, 80), want: "pod1* remote1"},
			row{from: "client1 remote3", to: atPrimary(30080), want: "pod1"},
			row{from: "pod3", to: atPrimary(30080), want: "pod1 remote1"},
			row{from: "node", to: atPrimary(30080), want: "pod1* remote1*"},
		)...)
	}
	return []world{
		{name: "masquerade all", needs: []Feature{MasqueradeAll}, config: config{masqueradeAll: true}, run: func(w cluster) {
			start(w)
			w.check(overUDP(
				row{from: everyone, to: clusterIP(1, 80), want: "pod1* remote1*"},
				row{from: everyone, to: atPod(2, podPort), want: "pass"},
				// It affects cluster IPs only.
				row{from: "client1", to: atPrimary(30080), want: "pod1"},
				row{from: "pod3", to: atPrimary(30080), want: "pod1 remote1"},
			)...)
		}},

		// The cluster's range includes the other nodes' pods: replies to them need no
		// masquerading either.
		{name: "local traffic by cluster CIDR", config: config{localTraffic: &cidrs}, run: func(w cluster) {
			start(w)
			// (A packet between two pods of the other node that keeps its source
			// would be answered directly, bypassing this node.)
			w.set(service{name: "here", number: 3, ports: tcpAndUDP(0), endpoints: on("pod1", "pod2")})
			w.check(overUDP(
				row{from: "client1 node", to: clusterIP(1, 80), want: "pod1* remote1*"},
				row{from: "pod3", to: clusterIP(1, 80), want: "pod1 remote1"},
				row{from: "pod3 remote3", to: clusterIP(3, 80), want: "pod1 pod2"},
				row{from: "client1", to: atPrimary(30080), want: "pod1"},
				row{from: "pod3", to: atPrimary(30080), want: "pod1 remote1"},
			)...)
		}},

		{
			name: "local traffic by bridge", needs: []Feature{InterfaceDetection},
			config: config{bridge: true, localTraffic: &ruleset.LocalTraffic{Bridge: bridgeName}}, run: detected,
		},

		{
			name: "local traffic by interface prefix", needs: []Feature{InterfaceDetection},
			config: config{localTraffic: &ruleset.LocalTraffic{InterfacePrefix: interfacePrefix}}, run: detected,
		},

		{name: "local traffic not recognized", config: config{localTraffic: &ruleset.LocalTraffic{}}, run: func(w cluster) {
			start(w)
			w.check(overUDP(
				row{from: "client1 pod3 node", to: clusterIP(1, 80), want: "pod1 remote1"},
				row{from: "pod1", to: clusterIP(1, 80), want: "pod1* remote1"},
				row{from: "client1 pod3", to: atPrimary(30080), want: "pod1"},
				row{from: "node", to: atPrimary(30080), want: "pod1* remote1*"},
			)...)
		}},
	}
}
