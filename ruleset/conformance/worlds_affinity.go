package conformance

// affinityClients is the number of clients in worlds about affinity. That all of them
// choose the same of six endpoints by accident has a probability of one in 10^11, and
// so has that none of them chooses another one when free to do so.
const affinityClients = 16

// affinityWorlds returns worlds about sessionAffinity ClientIP.
func affinityWorlds() []world {
	pods := []string{"pod1", "pod2", "pod3", "remote1", "remote2", "remote3"}
	c := config{clients: affinityClients}
	need := []Feature{Affinity}
	return []world{
		{name: "affinity switched on and off", needs: need, run: func(w cluster) {
			row := row{"client1", tcp, clusterIP(1, 80), "pod1* pod2* remote1*"}
			w.set(service{name: "web", number: 1, endpoints: on("pod1", "pod2", "remote1")})
			w.check(row)
			w.change("web", func(s *service) { s.affinity = 60 })
			w.check(row)
			w.change("web", func(s *service) { s.affinity = 0 })
			w.check(row)
			w.change("web", func(s *service) { s.affinity = 3600 })
			w.check(row)
		}},

		{name: "affinity and policy Local", needs: need, config: c, run: func(w cluster) {
			// Affinity from the time when every endpoint was usable must not send
			// clients to endpoints that the policy now excludes.
			s := service{name: "web", number: 1, kind: "NodePort", ports: tcpAndUDP(30080), affinity: 10800, endpoints: on(pods...)}
			w.set(s)
			w.chosen(tcp, atPrimary(30080))
			s.externalLocal = true
			w.set(s)
			w.check(row{"client1 client2 client3 client4 client5 client6", tcp, atPrimary(30080), "pod1 pod2 pod3"})
		}},
	}
}
