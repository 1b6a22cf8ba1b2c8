package conformance

import (
	"github.com/go-proxier/proxier/ruleset"
)

// weightPacketWorlds returns worlds about endpoints with weights.
func weightPacketWorlds() []world {
	need := []Feature{WeightedEndpoints}
	some := map[string]int{"pod1": 1, "pod2": 2, "pod3": 3, "remote1": 4, "remote2": 6}
	return []world{
		{name: "weights", needs: append(need, Distribution), run: packets(func(w *World) {
			w.set(service{name: "web", number: 1, ports: tcpAndUDP(0), endpoints: weighing(some, "pod1", "pod2", "pod3", "remote1", "remote2")})
			w.distribution(clusterIP(1, 80), some)
			// One endpoint gets another weight, one gets 0.
			now := map[string]int{"pod1": 1, "pod2": 0, "pod3": 7, "remote1": 4, "remote2": 6, "remote3": 1}
			w.change("web", func(s *service) {
				s.endpoints = weighing(now, "pod1", "pod2", "pod3", "remote1", "remote2", "remote3")
			})
			w.distribution(clusterIP(1, 80), now)
		})},

		{name: "large weights", needs: append(need, Distribution), run: packets(func(w *World) {
			weights := map[string]int{"pod1": 10007, "pod2": 20011, "pod3": 30013, "remote1": 40009, "remote2": 65521}
			w.set(service{name: "web", number: 1, ports: tcpAndUDP(0), endpoints: weighing(weights, "pod1", "pod2", "pod3", "remote1", "remote2")})
			w.distribution(clusterIP(1, 80), weights)
		})},

		{name: "weights and policies", needs: append(need, Distribution), run: packets(func(w *World) {
			// The local pool has shares of its own.
			w.set(service{
				name: "web", number: 1, kind: "NodePort", ports: tcpAndUDP(30080), externalLocal: true,
				endpoints: weighing(some, "pod1", "pod2", "pod3", "remote1", "remote2"),
			})
			w.distribution(atPrimary(30080), map[string]int{"pod1": some["pod1"], "pod2": some["pod2"], "pod3": some["pod3"]})
		})},

		{name: "weights and affinity", needs: append(need, Affinity), config: config{clients: affinityClients}, run: packets(func(w *World) {
			// Affinity takes precedence over weights other than 0.
			w.set(service{name: "web", number: 1, ports: tcpAndUDP(0), affinity: 10800, endpoints: weighing(some, "pod1", "pod2", "pod3", "remote1", "remote2")})
			to := clusterIP(1, 80)
			before := w.chosen(tcp, to)
			w.change("web", func(s *service) {
				s.endpoints = weighing(map[string]int{"pod1": 60, "pod2": 5, "pod3": 3, "remote1": 4, "remote2": 6}, "pod1", "pod2", "pod3", "remote1", "remote2")
			})
			w.same("when weights changed", before, w.chosen(tcp, to))
			gone := before[client{w.Env.Families[0], 1}].Addr()
			weights := map[string]int{}
			for _, p := range w.net.pods {
				weights[p.Name] = 2
				if p.addr(w.Env.Families[0]) == gone {
					weights[p.Name] = 0
				}
			}
			w.change("web", func(s *service) { s.endpoints = weighing(weights, "pod1", "pod2", "pod3", "remote1", "remote2") })
			for c, ep := range w.chosen(tcp, to) {
				none := w.podAt(c.family, before[c].Addr()) == w.podAt(w.Env.Families[0], gone)
				if !none && ep != before[c] || none && ep == before[c] {
					w.tb.Errorf("%s went from %s to %s when %s got weight 0", c, before[c], ep, gone)
				}
			}
		})},
	}
}

// totalWeight returns the sum of the endpoints' weights and the least of them, as
// judgeForward needs them.
func (w *World) totalWeight(v ruleset.Verdict) (sum, least int) {
	if !w.does(WeightedEndpoints) {
		return len(v.Endpoints), 1
	}
	for _, ep := range v.Endpoints {
		sum += int(ep.Weight)
		if least == 0 || int(ep.Weight) < least {
			least = int(ep.Weight)
		}
	}
	return sum, least
}
