package ruleset

import (
	"cmp"
	"slices"

	"github.com/go-proxier/proxier/tracker"
)

// mostShares returns the maximum number of shares of n endpoints with weights: an
// average of 16 each, but at least 256, so that few endpoints get shares accurate to
// about one per cent. More than 512 endpoints share 8,192, or two each if that is more: one
// changed weight may change all of them.
func mostShares(n int) int { return max(256, min(16*n, max(8192, 2*n))) }

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

// TotalShares returns the sum of the result of [Shares], at a lower cost.
func TotalShares(eps []*tracker.Endpoint) int {
	sum, divisor := reduced(eps)
	return min(sum/max(divisor, 1), mostShares(len(eps)))
}

// Shares converts the weights of a pool's endpoints to small integers, for uses such
// as numbers of buckets in a table. Each share is at least 1. The sum is at most 256,
// or 16 per endpoint if that is more. With more than 512 endpoints it is at most 8,192, or 2 per
// endpoint if that is more.
//
// Shares divides the weights by their greatest common divisor. If the sum is still
// too large, it distributes the maximum number of shares by the method of largest
// remainders, with at least one for each endpoint. No endpoint then has more than one
// share above its exact proportion. None has more than one share below it, apart from
// the shares that raised other endpoints to one. The result does not depend on the
// order of the endpoints, which must not be nil and whose addresses must differ. The
// caller owns the result.
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
	// Raise endpoints with less than one share to one, which may leave others with
	// less than one.
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

// Weighted reports whether the endpoints of the pool for a target have different
// weights. It is fast if all endpoints of the Service have the same weight.
func (s *Port) Weighted(t Target) bool {
	return !s.uniform && !uniform(s.Pool(t))
}

// uniform reports whether all endpoints have the same weight.
func uniform(eps []*tracker.Endpoint) bool {
	for _, ep := range eps {
		if ep.Weight != eps[0].Weight {
			return false
		}
	}
	return true
}
