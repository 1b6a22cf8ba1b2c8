package balance

import (
	"fmt"
	"math/rand/v2"
	"net/netip"
	"testing"
	"time"

	"github.com/go-proxier/proxier/tracker"
)

// loads holds numbers of connections by the last byte of the address.
type loads []int

func (l loads) load(a netip.AddrPort) int { return l[a.Addr().As4()[3]] }

// expense is what lighter compares, as a fraction.
func expense(l loads, p []*tracker.Endpoint, i int) float64 {
	return float64(l[i]+1) / float64(p[i].Weight)
}

func TestLeastConnectionsPicksTheLightest(t *testing.T) {
	r := rand.New(rand.NewPCG(3, 4))
	for range 2000 {
		n := 1 + r.IntN(9)
		l, weights := make(loads, n), make([]uint16, n)
		for i := range n {
			l[i], weights[i] = r.IntN(6), uint16(1+r.IntN(4))
		}
		p := pool(weights...)
		ep := (&LeastConnections{l.load}).Pick(p, client)
		for i := range p {
			if got := ep.Addr.Addr().As4()[3]; expense(l, p, i) < expense(l, p, int(got)) {
				t.Fatalf("connections %v, weights %v: picked %s", l, weights, name(ep))
			}
		}
	}
	// Equal endpoints are chosen equally often.
	seen := map[string]int{}
	for range 4000 {
		seen[name((&LeastConnections{loads{1, 0, 0, 0, 0}.load}).Pick(pool(equal(5)...), client))]++
	}
	for _, who := range []string{"b", "c", "d", "e"} {
		if n := seen[who]; n < 800 || n > 1200 { // seven standard deviations
			t.Errorf("of four equals %s was picked %d times of 4000", who, n)
		}
	}
	if seen["a"] != 0 {
		t.Error("the endpoint with the most connections was picked")
	}
}

func TestTwoChoicesNeverPicksTheHeaviest(t *testing.T) {
	// Of two endpoints the lighter one is always picked.
	two := &TwoChoices{loads{3, 2}.load}
	if got := picks(two, pool(1, 1), 50); got != "bbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbb" {
		t.Errorf("of 3 and 2 connections: %s", got)
	}
	if got := picks(two, pool(2, 1), 5); got != "aaaaa" {
		t.Errorf("of 3 connections with weight 2, and 2 with weight 1: %s", got)
	}
	many := loads{5, 5, 9, 5, 5, 0}
	seen := map[string]int{}
	for range 6000 {
		seen[name((&TwoChoices{many.load}).Pick(pool(equal(6)...), client))]++
	}
	if seen["c"] != 0 {
		t.Errorf("the heaviest was picked %d times", seen["c"])
	}
	// The lightest is one of the two with a chance of 1/3.
	if n := seen["f"]; n < 1700 || n > 2300 { // eight standard deviations
		t.Errorf("the lightest was picked %d times of 6000, about 2000 expected", n)
	}
}

// TestTwoChoicesBalancesLoad makes connections that stay open.
func TestTwoChoicesBalancesLoad(t *testing.T) {
	const endpoints, each = 50, 100
	l := make(loads, endpoints)
	b := &TwoChoices{l.load}
	p := pool(equal(endpoints)...)
	for range endpoints * each {
		l[b.Pick(p, client).Addr.Addr().As4()[3]]++
	}
	for i, n := range l {
		// With random choices one of fifty endpoints would be off by more than 20.
		if n < each-15 || n > each+15 {
			t.Errorf("endpoint %d has %d connections, %d expected", i, n, each)
		}
	}
}

// BenchmarkPick measures one choice, the cost for one connection.
func BenchmarkPick(b *testing.B) {
	for _, n := range []int{3, 100, 1000} {
		p := pool(equal(n)...)
		run := func(name string, bal Balancer) {
			b.Run(fmt.Sprintf("%s/endpoints=%d", name, n), func(b *testing.B) {
				b.ReportAllocs()
				for b.Loop() {
					if bal.Pick(p, client) == nil {
						b.Fatal("nothing picked")
					}
				}
			})
		}
		run("maglev", &Maglev{Port: true})
		for _, name := range Names() {
			a, err := Parse(name)
			if err != nil {
				b.Fatal(err)
			}
			run(name, a.New(idle))
			if a == 0 {
				run("affinity", NewAffinity(time.Hour, 0).Wrap(a.New(idle)))
			}
		}
	}
}
