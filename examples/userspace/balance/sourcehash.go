package balance

import (
	"math"
	"net/netip"

	"github.com/go-proxier/proxier/tracker"
)

// SourceHash sends a client always to the same endpoint of a pool, and different
// clients to different ones as the weights say. When an endpoint goes only its
// own clients move, and when one comes it takes over its share and no other client
// moves: this is rendezvous hashing (Thaler and Ravishankar, "Using Name-Based
// Mappings to Increase Hit Rates"), with weights. Nothing is remembered, so that
// proxies with the same Seed agree. The zero value is ready for use.
type SourceHash struct {
	// Seed makes another, unrelated choice for every client.
	Seed uint64
}

// Pick takes a step for each endpoint.
func (b *SourceHash) Pick(pool []*tracker.Endpoint, client netip.AddrPort) *tracker.Endpoint {
	var best *tracker.Endpoint
	top := math.Inf(-1)
	from := hashAddr(b.Seed, client.Addr())
	for _, ep := range pool {
		if ep.Weight == 0 {
			continue
		}
		h := mix(hashAddr(from, ep.Addr.Addr()) ^ uint64(ep.Addr.Port()))
		// Between 0 and 1, without both. The one with the largest of u^(1/weight) is
		// chosen with a probability proportional to its weight; that is the order of
		// ln(u)/weight too.
		u := (float64(h>>11) + 0.5) / (1 << 53)
		if score := math.Log(u) / float64(ep.Weight); best == nil || score > top {
			best, top = ep, score
		}
	}
	return best
}

// hashAddr continues a hash with an address.
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

// mix is the output function of SplitMix64 (Steele, Lea and Flood, "Fast
// Splittable Pseudorandom Number Generators"): every bit of x changes every bit
// of the result with a chance of about one half.
func mix(x uint64) uint64 {
	x += 0x9e3779b97f4a7c15
	x = (x ^ x>>30) * 0xbf58476d1ce4e5b9
	x = (x ^ x>>27) * 0x94d049bb133111eb
	return x ^ x>>31
}
