package ruleset

import (
	"cmp"
	"net/netip"
	"slices"

	"github.com/go-proxier/proxier/ruleset/maglev"
	"github.com/go-proxier/proxier/tracker"
)

// mostShares returns the maximum number of shares of n endpoints with weights: 16 each, but at least 256, and at most
// 8,192 or two each, because one changed weight may change all of them.
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

// Shares converts the weights of a pool's endpoints to small integers, such as numbers of buckets in a table. Each
// share is at least 1. The sum is at most 256, or 16 per endpoint if that is more. With more than 512 endpoints it is
// at most 8,192, or 2 per endpoint if that is more.
//
// Shares divides the weights by their greatest common divisor. If the sum is still too large, it distributes the
// maximum number of shares by the method of largest remainders. No endpoint then has more than one share above its
// exact proportion, nor more than one below it, apart from the shares that raised other endpoints to one. The result
// does not depend on the order of the endpoints, which must not be nil and whose addresses must differ. The caller
// owns the result.
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
	// Raising endpoints to one share may leave others with less than one.
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

// Weighted reports whether the endpoints of the pool for a target have different weights.
func (s *Port) Weighted(t Target) bool {
	return !s.uniform && !uniform(s.Pool(t))
}

func uniform(eps []*tracker.Endpoint) bool {
	for _, ep := range eps {
		if ep.Weight != eps[0].Weight {
			return false
		}
	}
	return true
}

// Hash returns [tracker.ServicePort].Hash, or [tracker.HashNone] if that is not one
// of its constants.
func (s *Port) Hash() tracker.Hash {
	switch h := s.Spec.Hash; h {
	case tracker.HashSource, tracker.HashSourcePort:
		return h
	}
	return tracker.HashNone
}

// HashOf returns the hash of a connection's source, the address alone or with the port, as Hash is. By this hash
// [maglev.Table.Find] finds the endpoint in the result of Maglev for the same seed. It returns 0 if Hash is
// [tracker.HashNone]. Package nftables makes the kernel compute the same hash; see [maglev.HashAddr].
func (s *Port) HashOf(source netip.AddrPort, seed uint64) uint32 {
	switch s.Hash() {
	case tracker.HashSource:
		return maglev.HashAddr(seed, source.Addr())
	case tracker.HashSourcePort:
		return maglev.HashAddrPort(seed, source)
	}
	return 0
}

// MaxBuckets is the largest size of a hash table, unless it has more endpoints: a table is written as a whole.
const MaxBuckets = 4093

// HashBuckets returns the number of buckets in the table that [Port.Maglev] makes
// for a target: the size that [tracker.ServicePort].HashBuckets asks for, or one that suits the number
// of endpoints, up to [MaxBuckets]. It returns 0 if Maglev returns nil.
func (s *Port) HashBuckets(t Target) int {
	n := len(s.Pool(t))
	if s.Hash() == tracker.HashNone || n == 0 {
		return 0
	}
	size := maglev.SizeFor(n)
	if asked := int(s.Spec.HashBuckets); asked != 0 {
		size = maglev.SizeAtLeast(asked)
	}
	return min(size, max(MaxBuckets, maglev.SizeAtLeast(n)))
}

// Maglev returns the table that chooses the endpoints of a pool: the member in a bucket is an index into [Port.Pool]
// of t. It returns nil if Hash is [tracker.HashNone] or the pool is empty. The table depends only on the addresses
// and weights of the pool, the size and the seed, which is [Node].HashSeed. Each call computes the table again. Only
// the first [maglev.MaxSize] endpoints of a pool are in it.
func (s *Port) Maglev(t Target, seed uint64) *maglev.Table {
	size := s.HashBuckets(t)
	if size == 0 {
		return nil
	}
	pool := s.Pool(t)
	members := make([]maglev.Member, min(len(pool), maglev.MaxSize))
	for i := range members {
		members[i] = maglev.Member{Addr: pool[i].Addr, Weight: pool[i].Weight}
	}
	return maglev.Build(seed, size, members)
}
