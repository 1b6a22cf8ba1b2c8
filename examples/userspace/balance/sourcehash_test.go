package balance

import (
	"math"
	"net/netip"
	"slices"
	"testing"
)

// TestSourceHashDistributesByWeight checks the choices of many clients. It uses no random
// numbers.
func TestSourceHashDistributesByWeight(t *testing.T) {
	const clients = 20000
	weights := []uint16{1, 1, 2, 4, 8, 0}
	p := pool(weights...)
	b := &SourceHash{}
	seen := make([]int, len(p))
	differ := 0
	for i := range clients {
		c := clientNumber(i)
		ep := b.Pick(p, c)
		if again := (&SourceHash{}).Pick(slices.Clone(p), netip.AddrPortFrom(c.Addr(), 7)); again != ep {
			t.Fatalf("%s: %s, then %s", c, ep, again)
		}
		if (&SourceHash{Seed: 1}).Pick(p, c) != ep {
			differ++
		}
		seen[slices.Index(p, ep)]++
	}
	for i, w := range weights {
		want := clients * float64(w) / 16
		if math.Abs(float64(seen[i])-want) > 5*math.Sqrt(want) {
			t.Errorf("of weights %v clients chose %v", weights, seen)
			break
		}
	}
	if differ < clients/2 {
		t.Errorf("another seed moves %d of %d clients", differ, clients)
	}
}

// TestSourceHashMovesFewClients adds and removes endpoints.
func TestSourceHashMovesFewClients(t *testing.T) {
	b := &SourceHash{}
	for _, n := range []int{2, 3, 10, 100} {
		p := pool(equal(n)...)
		gone := p[n/2]
		rest := slices.Concat(p[:n/2], p[n/2+1:])
		moved := 0
		const clients = 5000
		for i := range clients {
			c := clientNumber(i)
			with, without := b.Pick(p, c), b.Pick(rest, c)
			switch {
			case with == gone:
				moved++
			case with != without:
				t.Fatalf("%d endpoints: %s was moved from %s to %s when %s went", n, c, with, without, gone)
			}
		}
		want := float64(clients) / float64(n)
		if math.Abs(float64(moved)-want) > 5*math.Sqrt(want) {
			t.Errorf("%d endpoints: %d of %d clients moved", n, moved, clients)
		}
	}
}
