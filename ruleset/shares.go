package ruleset

import (
	"cmp"
	"slices"

	"github.com/go-proxier/proxier/tracker"
)

// mostShares is how many slots n endpoints with weights have at the most: 16 each
// on average, and as many as make one in the hundred of a few.
func mostShares(n int) int { return max(256, 16*n) }

// reduced returns the sum of the weights and their greatest common divisor.
func reduced(eps []*tracker.Endpoint) (sum, divisor int) {
	for _, ep := range eps {
		w := int(ep.Weight)
		sum += w
		for a, b := w, divisor; ; a, b = b, a%b {
			if b == 0 {
				divisor = a
				break
			}
		}
	}
	return sum, divisor
}

// TotalShares returns the sum of what [Shares] returns, at a lower cost.
func TotalShares(eps []*tracker.Endpoint) int {
	sum, divisor := reduced(eps)
	return min(sum/max(divisor, 1), mostShares(len(eps)))
}

// Shares returns what each endpoint of a pool counts for where weights have to be
// small whole numbers, such as numbers of slots in a table: at least 1 each. Their
// sum is 256 at the most, or 16 for each endpoint where that is more. Weights are
// divided by what they have in common; if that makes too much,
// so many shares as are allowed are given out by the method of largest remainders,
// but at least one to each. Then no endpoint has more than one share beyond what
// its weight comes to, and none has more than one less, apart from what those have
// together that were raised to one. It does not depend on the order of the
// endpoints, whose addresses must differ. The result is the caller's own.
func Shares(eps []*tracker.Endpoint) []int {
	out := make([]int, len(eps))
	sum, divisor := reduced(eps)
	slots := mostShares(len(eps))
	if sum/max(divisor, 1) <= slots {
		for i, ep := range eps {
			out[i] = int(ep.Weight) / max(divisor, 1)
		}
		return out
	}
	// Who is too light for a slot gets one, which may make others too light.
	for raised := true; raised; {
		raised = false
		weights, rest := sum, slots
		for i, ep := range eps {
			if out[i] == 0 && int(ep.Weight)*rest < weights {
				out[i] = 1
				raised = true
				sum -= int(ep.Weight)
				slots--
			}
		}
	}
	type remainder struct{ at, left int }
	var remainders []remainder
	given := 0
	for i, ep := range eps {
		if out[i] == 0 {
			out[i] = int(ep.Weight) * slots / sum
			given += out[i]
			remainders = append(remainders, remainder{i, int(ep.Weight) * slots % sum})
		}
	}
	slices.SortFunc(remainders, func(a, b remainder) int {
		return cmp.Or(cmp.Compare(b.left, a.left), eps[a.at].Addr.Compare(eps[b.at].Addr))
	})
	for _, r := range remainders[:slots-given] {
		out[r.at]++
	}
	return out
}
