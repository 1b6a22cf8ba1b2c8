package balance

import (
	"math"
	"math/rand/v2"
	"slices"
	"testing"
)

func TestRoundRobinFollowsAChangedPool(t *testing.T) {
	p := pool(equal(5)...)
	b := &RoundRobin{}
	for _, step := range []struct {
		pool []int // of p
		want string
	}{
		{[]int{0, 1, 2}, "abcab"},
		{[]int{0, 1, 2, 3}, "cda"},  // one more
		{[]int{1, 2, 3}, "bcdb"},    // a, the last one, is gone
		{[]int{0, 2, 3, 4}, "cdea"}, // b, the last one, is gone; a and e are new
		{[]int{4}, "ee"},
		{[]int{0, 1}, "ab"},
	} {
		now := p[:0:0]
		for _, i := range step.pool {
			now = append(now, p[i])
		}
		if got := picks(b, now, len(step.want)); got != step.want {
			t.Errorf("among %v: %s, want %s", step.pool, got, step.want)
		}
	}
	if got := picks(&RoundRobin{}, pool(7, 0, 1), 4); got != "acac" {
		t.Errorf("weights 7, 0 and 1: %s", got)
	}
}

func TestWeightedRoundRobinIsSmooth(t *testing.T) {
	for _, c := range []struct {
		weights []uint16
		want    string
	}{
		{[]uint16{1, 1, 1}, "abcabc"},
		{[]uint16{5, 1, 1}, "aabacaaaabacaa"},
		{[]uint16{1, 2}, "babbab"},
		{[]uint16{0, 2, 1}, "bcbbcb"},
	} {
		if got := picks(&WeightedRoundRobin{}, pool(c.weights...), len(c.want)); got != c.want {
			t.Errorf("weights %v: %s, want %s", c.weights, got, c.want)
		}
	}
}

// TestWeightedRoundRobinPicksByWeight checks that in a round each endpoint is picked exactly
// as often as its weight, and that at no time it is a full pick away from its share.
func TestWeightedRoundRobinPicksByWeight(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 2))
	for range 100 {
		weights := make([]uint16, 1+r.IntN(8))
		total := 0
		for i := range weights {
			weights[i] = uint16(r.IntN(20))
			total += int(weights[i])
		}
		p, b := pool(weights...), &WeightedRoundRobin{}
		got := make([]int, len(p))
		for n := 1; n <= total; n++ {
			got[slices.Index(p, b.Pick(p, client))]++
			for i := range p {
				if share := float64(n) * float64(weights[i]) / float64(total); math.Abs(float64(got[i])-share) >= float64(len(p)) {
					t.Fatalf("weights %v: after %d picks %v", weights, n, got)
				}
			}
		}
		for i, w := range weights {
			if got[i] != int(w) {
				t.Fatalf("weights %v: %v", weights, got)
			}
		}
	}
}

// TestWeightedRoundRobinLimitsDebt checks that the debt of an endpoint from a time of large
// weights does not delay its picks when weights are small.
func TestWeightedRoundRobinLimitsDebt(t *testing.T) {
	b := &WeightedRoundRobin{}
	b.Pick(pool(65535, 65534, 65533), client)
	got := picks(b, pool(1, 1, 1), 30)
	for _, who := range "abc" {
		n := 0
		for _, x := range got {
			if x == who {
				n++
			}
		}
		if n < 8 {
			t.Errorf("%c was picked %d times of 30: %s", who, n, got)
		}
	}
}

func TestWeightedRoundRobinDropsOldEndpoints(t *testing.T) {
	b := &WeightedRoundRobin{}
	many := pool(equal(5000)...)
	for i := 0; i+10 <= len(many); i += 10 {
		b.Pick(many[i:i+10], client)
	}
	if len(b.credit) > 50 {
		t.Errorf("%d endpoints are stored for a pool of 10", len(b.credit))
	}
}
