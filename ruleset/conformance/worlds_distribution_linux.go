package conformance

import (
	"math"
	"net/netip"
	"sync"

	"github.com/go-proxier/proxier/tracker"
)

// distributionWorlds returns worlds about the distribution of connections over endpoints.
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

// unlikely is the probability below which an outcome is a failure. A run of the suite
// checks about a dozen outcomes.
const unlikely = 1e-10

// distribution sends many UDP requests and compares their distribution with the pods'
// weights by Pearson's chi-squared test. It fails if the outcome is unlikely. The
// number of non-zero weights must be odd.
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
		// Endpoints without requests are accounted for below.
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
		w.tb.Errorf("%s: the distribution of %d requests over %d endpoints does not match their weights: %s (chi-squared %.1f)", f, requests, n, counts(seen), chi2)
	}
}
