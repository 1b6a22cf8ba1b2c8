package conformance

import (
	"fmt"
	"math"
	"net/netip"
	"strings"
	"sync"

	"github.com/go-proxier/proxier/internal/testing/netlab"
	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/tracker"
)

// distributionWorlds returns worlds about the distribution of connections over endpoints.
func distributionWorlds() []world {
	return []world{
		{name: "distribution", needs: []Feature{Distribution}, run: packets(func(w *World) {
			const pods = "pod1,pod2,pod3,remote1,remote2"
			runScript(w, "set web cluster=1 endpoints="+pods)
			w.distribution(clusterIP(1, 80), pods)
		})},

		{name: "distribution over many endpoints", needs: []Feature{Distribution}, config: config{remotePods: manyPods}, run: packets(func(w *World) {
			pods := strings.Join(remotes(manyPods), ",")
			runScript(w, "set web cluster=1 endpoints="+pods)
			w.distribution(clusterIP(1, 80), pods)
		})},
	}
}

// unlikely is the probability below which an outcome is a failure. A run of the suite
// checks about a dozen outcomes.
const unlikely = 1e-10

// distribution syncs the backend. In each family it then sends many requests, over UDP if the
// backend supports it, and compares their distribution with the weights of endpoints, in the form of a
// script, by Pearson's chi-squared test. It
// fails if the outcome is unlikely, and stops early if it is ordinary. The number of
// non-zero weights must be odd.
func (w *World) distribution(to target, text string) {
	w.tb.Helper()
	weights := map[string]int{}
	for _, e := range list(text, parseEndpoint) {
		weights[e.pod] = 1
		if e.weight != nil {
			weights[e.pod] = *e.weight
		}
	}
	w.Sync()
	for _, f := range w.ipFamilies {
		if err := w.distributionIn(f, to.at(f), weights); err != nil {
			w.tb.Errorf("%s: %v", f, err)
		}
	}
}

func (w *World) distributionIn(f tracker.Family, to netip.AddrPort, weights map[string]int) error {
	const requests, step, ordinary = 2000, 500, 0.3
	seen := map[netip.AddrPort]int{}
	for sent := step; sent <= requests; sent += step {
		if err := w.requests(to, step, seen); err != nil {
			return err
		}
		p, err := w.likelihood(f, seen, sent, weights)
		switch {
		case err != nil || p > ordinary:
			return err
		case p < unlikely:
			return fmt.Errorf("the distribution of %d requests over %d endpoints does not match their weights: %s (probability %.1g)", sent, positive(weights), counts(seen), p)
		}
	}
	return nil
}

// requests sends n requests and counts the endpoints that reply.
func (w *World) requests(to netip.AddrPort, n int, seen map[netip.AddrPort]int) (err error) {
	const workers = 4
	proto := udp
	if !w.does(UDP) {
		proto = tcp
	}
	var (
		mu sync.Mutex
		wg sync.WaitGroup
	)
	for range workers {
		wg.Go(func() {
			for range n / workers {
				o := w.probe(w.net.hosts["client1"], proto, to, w.timeout())
				mu.Lock()
				if o.Kind == netlab.Reached {
					seen[o.Server]++
				} else {
					err = fmt.Errorf("%s: %s", to, o)
				}
				failed := err != nil
				mu.Unlock()
				if failed {
					return
				}
			}
		})
	}
	wg.Wait()
	return err
}

// likelihood returns the probability of a distribution of requests that matches the weights no
// better than the given one.
func (w *World) likelihood(f tracker.Family, seen map[netip.AddrPort]int, requests int, weights map[string]int) (float64, error) {
	sum := 0
	for _, weight := range weights {
		sum += weight
	}
	chi2 := float64(requests)
	for ep, got := range seen {
		weight := weights[w.podAt(f, ep.Addr())]
		if weight == 0 {
			return 0, fmt.Errorf("%d requests went to %s, which must have none", got, ep)
		}
		want := float64(requests) * float64(weight) / float64(sum)
		// The first value of chi2 is the sum of all wants, of which an endpoint without
		// requests contributes its own.
		chi2 += (float64(got)-want)*(float64(got)-want)/want - want
	}
	// With an even number 2k of degrees of freedom, a value above x has the
	// probability e^(-x/2) * sum of (x/2)^i/i! for i < k.
	p, term := 0.0, math.Exp(-chi2/2)
	for i := 0; i < (positive(weights)-1)/2; i++ {
		p += term
		term *= chi2 / 2 / float64(i+1)
	}
	return p, nil
}

// positive returns the number of weights that are not 0.
func positive(weights map[string]int) (n int) {
	for _, weight := range weights {
		if weight != 0 {
			n++
		}
	}
	return n
}

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
