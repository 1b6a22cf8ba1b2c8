package iptables

import (
	"bytes"
	"fmt"
	"log/slog"
	"math"
	"math/rand/v2"
	"strconv"
	"strings"
	"testing"

	v1 "k8s.io/api/core/v1"

	"github.com/go-proxier/proxier/internal/iptext"
	"github.com/go-proxier/proxier/internal/testing/backendtest"
	"github.com/go-proxier/proxier/internal/testing/must"
	"github.com/go-proxier/proxier/tracker"
)

// TestChoiceFollowsWeights computes from the rules the probability of each endpoint, which
// must be in proportion to its weight.
func TestChoiceFollowsWeights(t *testing.T) {
	t.Parallel()
	for _, n := range []int{1, 2, 3, 10, flatPool, flatPool + 1, 100, 1000, 5000} {
		for _, most := range []int{1, 3, 65535} {
			testChoice(t, n, most)
		}
	}
}

func testChoice(t *testing.T, n, heaviest int) {
	rng := rand.New(rand.NewPCG(uint64(n), uint64(heaviest)))
	endpoints := make([]choice, n)
	for i := range endpoints {
		endpoints[i] = choice{prefixEndpoint + hashOf(strconv.Itoa(n), strconv.Itoa(i)), 1 + rng.IntN(heaviest)}
	}
	sum := float64(total(endpoints))
	rules, groups := choose(endpoints, "KUBE-SVC-TEST", 0, draw)
	chains := map[string][]string{"": rules}
	for i, g := range groups {
		if chains[g.name] != nil {
			t.Fatalf("%d endpoints: chain %s twice", n, g.name)
		}
		chains[g.name] = g.rules
		for _, later := range groups[i+1:] {
			if later.rank < g.rank && strings.Contains(strings.Join(later.rules, "\n"), g.name) {
				t.Errorf("%d endpoints: a chain is written before one it leads to", n)
			}
		}
	}
	likely := map[string]float64{}
	most := 0
	var follow func(chain string, p float64, met int)
	follow = func(chain string, p float64, met int) {
		for i, rule := range chains[chain] {
			q := p
			if _, after, ok := strings.Cut(rule, "--probability "); ok {
				share := must.Get(strconv.ParseFloat(strings.Fields(after)[0], 64))(t)
				q = p * share
			}
			to := iptext.Target(rule)
			if chains[to] != nil {
				follow(to, q, met+i+1)
			} else {
				likely[to] += q
				most = max(most, met+i+1)
			}
			p -= q
		}
		if p > 1e-12 {
			t.Errorf("%d endpoints: %g of the connections leave chain %q without an endpoint", n, p, chain)
		}
	}
	follow("", 1, 0)
	for _, ep := range endpoints {
		share := float64(ep.weight) / sum
		if math.Abs(likely[ep.chain]-share) > share*1e-4+32*math.Exp2(-31) {
			t.Fatalf("%d endpoints: %s is chosen %g times as often as it should", n, ep.chain, likely[ep.chain]/share)
		}
	}
	if n > flatPool && most > 32*(1+int(math.Log2(float64(n))/5)) {
		t.Errorf("%d endpoints: a connection may meet %d rules", n, most)
	}
}

// TestNamesDoNotDeepenGroups chooses among endpoints whose chains' names begin alike.
func TestNamesDoNotDeepenGroups(t *testing.T) {
	t.Parallel()
	var endpoints []choice
	for i := range 20_000 {
		endpoints = append(endpoints, choice{fmt.Sprintf("%sAAAAAAAA%08d", prefixEndpoint, i), 1})
	}
	rules, groups := choose(endpoints, "KUBE-SVC-TEST", 0, draw)
	chains := map[string][]string{"": rules}
	for _, g := range groups {
		chains[g.name] = g.rules
	}
	found := 0
	var follow func(chain string, depth int)
	follow = func(chain string, depth int) {
		if rules := chains[chain]; len(rules) > groupPool || depth > maxGroupDepth+1 {
			t.Errorf("chain %s has %d rules and is %d deep", chain, len(rules), depth)
		}
		for _, r := range chains[chain] {
			if to := iptext.Target(r); chains[to] != nil {
				follow(to, depth+1)
			} else {
				found++
			}
		}
	}
	if follow("", 0); found != len(endpoints) {
		t.Errorf("%d of %d endpoints", found, len(endpoints))
	}
}

// TestServiceWithHashIsServedAtRandom applies a Service that asks for a hash. It must be
// programmed without the hash, and logged once for each family.
func TestServiceWithHashIsServedAtRandom(t *testing.T) {
	t.Parallel()
	systems(t, func(t *testing.T, flavor system) {
		t.Parallel()
		var log bytes.Buffer
		r := newRig(t, flavor, func(c *Config) { c.Log = slog.New(slog.NewTextHandler(&log, nil)) })
		n := backendtest.NewNode(t, tracker.Config{OnService: func(s *v1.Service, _ *v1.ServicePort, p *tracker.ServicePort) error {
			if s.Name == svc(0).Name {
				p.Hash = tracker.HashSource
			}
			return nil
		}})
		r.tracker, r.engine = n.Tracker, n.Engine
		r.start()
		for i := range 2 {
			r.set(i, []int{1, 2})
		}
		for range 2 {
			r.sync()
			r.verify()
			r.cursor.Resync()
		}
		if logged := strings.Count(log.String(), "chosen at random"); logged != 2 {
			t.Errorf("logged %d times:\n%s", logged, log.String())
		}
	}, NFT)
}
