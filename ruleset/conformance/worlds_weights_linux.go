package conformance

import (
	"fmt"
	"strings"

	"github.com/go-proxier/proxier/ruleset"
)

// weightPacketWorlds returns worlds about endpoints with weights.
func weightPacketWorlds() []world {
	need := []Feature{WeightedEndpoints}
	const some = "pod1/weight=1,pod2/weight=2,pod3/weight=3,remote1/weight=4,remote2/weight=6"
	return []world{
		{name: "weights", needs: append(need, Distribution), run: packets(func(w *World) {
			runScript(w, "set web cluster=1 endpoints="+some)
			w.distribution(clusterIP(1, 80), some)
			// One endpoint gets another weight, one gets 0.
			const now = "pod1/weight=1,pod2/weight=0,pod3/weight=7,remote1/weight=4,remote2/weight=6,remote3/weight=1"
			runScript(w, "change web endpoints="+now)
			w.distribution(clusterIP(1, 80), now)
		})},

		{name: "large weights", needs: append(need, Distribution), run: packets(func(w *World) {
			const large = "pod1/weight=10007,pod2/weight=20011,pod3/weight=30013,remote1/weight=40009,remote2/weight=65521"
			runScript(w, "set web cluster=1 endpoints="+large)
			w.distribution(clusterIP(1, 80), large)
		})},

		{name: "weights and policies", needs: append(need, Distribution), run: packets(func(w *World) {
			// The local pool has shares of its own.
			runScript(w, "set web cluster=1 type=NodePort ports=80:30080 externalPolicy=Local endpoints="+some)
			w.distribution(atPrimary(30080), "pod1/weight=1,pod2/weight=2,pod3/weight=3")
		})},

		{name: "weights and affinity", needs: append(need, Affinity), config: config{clients: affinityClients}, run: packets(func(w *World) {
			// Affinity takes precedence over weights other than 0.
			runScript(w, "set web cluster=1 affinity=10800 endpoints="+some)
			to := clusterIP(1, 80)
			before := w.chosen(tcp, to)
			runScript(w, "change web endpoints=pod1/weight=60,pod2/weight=5,pod3/weight=3,remote1/weight=4,remote2/weight=6")
			w.same("when weights changed", before, w.chosen(tcp, to))
			gone := before[client{w.Env.Families[0], 1}].Addr()
			var endpoints []string
			for _, p := range w.net.pods {
				weight := 2
				if p.addr(w.Env.Families[0]) == gone {
					weight = 0
				}
				endpoints = append(endpoints, fmt.Sprintf("%s/weight=%d", p.Name, weight))
			}
			runScript(w, "change web endpoints="+strings.Join(endpoints[:5], ","))
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
