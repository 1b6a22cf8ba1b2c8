package balance

import (
	"math"
	"net/netip"

	"github.com/go-proxier/proxier/tracker"
)

// SourceHash always sends a client to the same endpoint of a pool, and distributes clients
// in proportion to the weights. When an endpoint is removed, only its own clients move. When
// one is added, it takes over its share and no other client moves. The method is rendezvous
// hashing (Thaler and Ravishankar, "Using Name-Based Mappings to Increase Hit Rates") with
// weights. SourceHash has no state, so proxies with the same Seed agree. The zero value is
// ready for use.
type SourceHash struct {
	// Seed selects a hash function. Choices with different seeds are unrelated.
	Seed uint64
}

// Pick implements [Balancer]. It takes time proportional to the size of the pool.
func (b *SourceHash) Pick(pool []*tracker.Endpoint, client netip.AddrPort) *tracker.Endpoint {
	var best *tracker.Endpoint
	top := math.Inf(-1)
	from := hashAddr(b.Seed, client.Addr())
	for _, ep := range pool {
		if ep.Weight == 0 {
			continue
		}
		h := mix(hashAddr(from, ep.Addr.Addr()) ^ uint64(ep.Addr.Port()))
		// u is between 0 and 1, exclusive. The endpoint with the largest u^(1/weight) is
		// chosen with a probability proportional to its weight. ln(u)/weight has the same
		// order.
		u := (float64(h>>11) + 0.5) / (1 << 53)
		if score := math.Log(u) / float64(ep.Weight); best == nil || score > top {
			best, top = ep, score
		}
	}
	return best
}

// hashAddr adds an address to a hash.
func hashAddr(h uint64, a netip.Addr) uint64 {
	b := a.As16()
	for i := 0; i < 16; i += 8 {
		var word uint64
		for _, x := range b[i : i+8] {
			word = word<<8 | uint64(x)
		}
		h = mix(h ^ word)
	}
	return h
}

// mix is the output function of SplitMix64 (Steele, Lea and Flood, "Fast Splittable
// Pseudorandom Number Generators"). Every bit of x changes every bit of the result with a
// probability of about one half.
func mix(x uint64) uint64 {
	x += 0x9e3779b97f4a7c15
	x = (x ^ x>>30) * 0xbf58476d1ce4e5b9
	x = (x ^ x>>27) * 0x94d049bb133111eb
	return x ^ x>>31
}
