package conformance

import (
	"math"
	"net/netip"
	"sync"

	"github.com/go-proxier/proxier/tracker"
)

// distributionWorlds are about how connections are distributed over endpoints.
func distributionWorlds() []world {
	return []world{
		{name: "distribution", needs: []Feature{Distribution}, run: packets(func(w *World) {
			pods := []string{"pod1", "pod2", "pod3", "remote1", "remote2"}
			w.set(service{name: "web", number: 1, ports: tcpAndUDP(0), endpoints: on(pods...)})
			w.Sync()
			for _, f := range w.Env.Families {
				w.distribution(f, clusterIP(1, 80).at(f), equally(pods))
			}
		})},

		{name: "distribution over many endpoints", needs: []Feature{Distribution}, config: config{remotePods: manyPods}, run: packets(func(w *World) {
			w.set(service{name: "web", number: 1, ports: tcpAndUDP(0), endpoints: on(remotes(manyPods)...)})
			w.Sync()
			for _, f := range w.Env.Families {
				w.distribution(f, clusterIP(1, 80).at(f), equally(remotes(manyPods)))
			}
		})},
	}
}

// unlikely is the probability of an outcome that is not taken for an accident. A suite
// looks at a dozen, in each of its runs.
const unlikely = 1e-10

// distribution sends many UDP requests and fails if an outcome so far from the
// pods' weights is unlikely, by Pearson's chi-squared test. The number of those that
// are not 0 must be odd.
func (w *World) distribution(f tracker.Family, to netip.AddrPort, weights map[string]int) {
	w.tb.Helper()
	n, sum := 0, 0
	for _, weight := range weights {
		sum += weight
		if weight != 0 {
			n++
		}
	}
	const requests, workers = 2000, 4
	var (
		mu   sync.Mutex
		seen = map[netip.AddrPort]int{}
		wg   sync.WaitGroup
	)
	for range workers {
		wg.Go(func() {
			for range requests / workers {
				o := w.net.hosts["client1"].probe(w.tb.Context(), udp, to, w.timeout())
				if o.kind != reached {
					w.tb.Errorf("%s: %s", to, o)
					return
				}
				mu.Lock()
				seen[o.server]++
				mu.Unlock()
			}
		})
	}
	wg.Wait()
	chi2 := 0.0
	for ep, got := range seen {
		weight := weights[w.podAt(f, ep.Addr())]
		if weight == 0 {
			w.tb.Errorf("%s: %d requests went to %s, which must have none", f, got, ep)
			return
		}
		want := float64(requests) * float64(weight) / float64(sum)
		// What an endpoint without requests adds is made up for below.
		chi2 += (float64(got)-want)*(float64(got)-want)/want - want
	}
	chi2 += requests
	// With an even number 2k of degrees of freedom, a value above x has the
	// probability e^(-x/2) * sum of (x/2)^i/i! for i < k.
	p, term := 0.0, math.Exp(-chi2/2)
	for i := 0; i < (n-1)/2; i++ {
		p += term
		term *= chi2 / 2 / float64(i+1)
	}
	if p < unlikely {
		w.tb.Errorf("%s: %d requests went to %d endpoints otherwise than by weight: %s (chi-squared %.1f)", f, requests, n, counts(seen), chi2)
	}
}
