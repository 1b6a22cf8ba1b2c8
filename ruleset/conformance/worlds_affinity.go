package conformance

// affinityClients is the number of clients in worlds about affinity: if they all
// choose the same of six endpoints, or none of them chooses another one when it is
// free to, that is no accident (one in 10^11).
const affinityClients = 16

// affinityWorlds are about sessionAffinity ClientIP.
func affinityWorlds() []world {
	pods := []string{"pod1", "pod2", "pod3", "remote1", "remote2", "remote3"}
	c := config{clients: affinityClients}
	need := []Feature{Affinity}
	return []world{
		{name: "affinity switched on and off", needs: need, run: func(w cluster) {
			row := row{"client1", tcp, clusterIP(1, 80), "pod1* pod2* remote1*"}
			w.set(service{name: "web", number: 1, endpoints: on("pod1", "pod2", "remote1")})
			w.Sync()
			w.check(row)
			w.change("web", func(s *service) { s.affinity = 60 })
			w.Sync()
			w.check(row)
			w.change("web", func(s *service) { s.affinity = 0 })
			w.Sync()
			w.check(row)
			w.change("web", func(s *service) { s.affinity = 3600 })
			w.Sync()
			w.check(row)
		}},

		{name: "affinity and policy Local", needs: need, config: c, run: func(w cluster) {
			// What is remembered from a time when every endpoint could be used must
			// not lead out of those that can be used now.
			s := service{name: "web", number: 1, kind: "NodePort", ports: tcpAndUDP(30080), affinity: 10800, endpoints: on(pods...)}
			w.set(s)
			w.Sync()
			w.chosen(tcp, atPrimary(30080))
			s.externalLocal = true
			w.set(s)
			w.Sync()
			w.check(row{"client1 client2 client3 client4 client5 client6", tcp, atPrimary(30080), "pod1 pod2 pod3"})
		}},
	}
}
