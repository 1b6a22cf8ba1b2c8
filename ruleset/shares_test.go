package ruleset

import (
	"math"
	"math/rand/v2"
	"net/netip"
	"testing"

	"github.com/go-proxier/proxier/tracker"
)

// weighing returns endpoints with the given weights.
func weighing(weights ...uint16) []*tracker.Endpoint {
	var out []*tracker.Endpoint
	for i, w := range weights {
		a := netip.AddrFrom4([4]byte{10, 244, byte(i >> 8), byte(i)})
		out = append(out, &tracker.Endpoint{Addr: netip.AddrPortFrom(a, 80), Weight: w})
	}
	return out
}

// TestSharesFollowWeights compares shares with weights, within the documented error.
func TestSharesFollowWeights(t *testing.T) {
	rng := rand.New(rand.NewPCG(5, 6))
	for range 2000 {
		n := 1 + rng.IntN([]int{3, 30, 500}[rng.IntN(3)])
		most := []int{1, 3, 100, 65535}[rng.IntN(4)]
		weights := make([]uint16, n)
		sum := 0
		for i := range weights {
			weights[i] = uint16(1 + rng.IntN(most))
			if rng.IntN(10) == 0 {
				weights[i] = 1
			}
			sum += int(weights[i])
		}
		eps := weighing(weights...)
		got := Shares(eps)
		total, raised := 0, 0
		for i, s := range got {
			total += s
			if s == 1 {
				raised++
			}
			if s < 1 {
				t.Fatalf("weight %d of %d: no share", weights[i], sum)
			}
		}
		if total != TotalShares(eps) || total > mostShares(n) {
			t.Fatalf("%d shares for %v, TotalShares %d, at most %d", total, weights, TotalShares(eps), mostShares(n))
		}
		for i, s := range got {
			// One share more or less, and those taken by endpoints raised to one.
			want := float64(weights[i]) / float64(sum) * float64(total)
			if off := float64(s) - want; off > 1 || off < -1-want*float64(raised)/float64(total) {
				t.Fatalf("weight %d of %d: %d of %d shares", weights[i], sum, s, total)
			}
			if total < mostShares(n) && math.Abs(float64(s)-want) > 1e-6 {
				t.Fatalf("weight %d of %d: %d of %d shares, though the exact number was possible", weights[i], sum, s, total)
			}
		}
		// The order of endpoints does not matter.
		order := rng.Perm(n)
		other := make([]*tracker.Endpoint, n)
		for i, j := range order {
			other[i] = eps[j]
		}
		for i, s := range Shares(other) {
			if s != got[order[i]] {
				t.Fatalf("in another order weight %d has %d shares, had %d", other[i].Weight, s, got[order[i]])
			}
		}
	}
}
