package balance

import (
	"math"
	"net/netip"
	"slices"
	"sync"

	"github.com/go-proxier/proxier/ruleset/maglev"
	"github.com/go-proxier/proxier/tracker"
)

// keptTables is the number of tables that a [Maglev] keeps: the table of the whole pool, and
// tables without a failed endpoint.
const keptTables = 4

// Maglev chooses by a table of package maglev. The choice depends only on the pool, the Seed
// and the client, so proxies with the same Seed agree, and so do data planes that use
// [ruleset.Port.Maglev]. The zero value is ready for use.
type Maglev struct {
	// Seed is the HashSeed of [ruleset.Node].
	Seed uint64
	// Slots is the minimum size of the table (see [maglev.SizeAtLeast]). 0 means a size
	// that suits the pool. Set it to the whole pool's number if Pick gets parts of the pool:
	// another size sends most clients to other endpoints.
	Slots int
	// Port includes the client's port in the hash.
	Port bool

	mu     sync.Mutex
	tables []table // the one used last first
}

// table is a table with its parameters.
type table struct {
	members []maglev.Member
	table   *maglev.Table
}

// Pick implements [Balancer]. It takes time proportional to the size of the pool, and builds
// a table if the pool differs from the last few pools.
func (b *Maglev) Pick(pool []*tracker.Endpoint, client netip.AddrPort) *tracker.Endpoint {
	t := b.tableOf(pool[:min(len(pool), maglev.MaxSize)])
	if t.Len() == 0 {
		return nil
	}
	hash := maglev.HashAddr(b.Seed, client.Addr())
	if b.Port {
		hash = maglev.HashAddrPort(b.Seed, client)
	}
	return pool[t.Find(hash)]
}

func (b *Maglev) tableOf(pool []*tracker.Endpoint) *maglev.Table {
	b.mu.Lock()
	defer b.mu.Unlock()
	same := func(m maglev.Member, ep *tracker.Endpoint) bool { return m.Addr == ep.Addr && m.Weight == ep.Weight }
	i := slices.IndexFunc(b.tables, func(t table) bool { return slices.EqualFunc(t.members, pool, same) })
	var t table
	if i >= 0 {
		t = b.tables[i]
	} else {
		t.members = make([]maglev.Member, len(pool))
		for i, ep := range pool {
			t.members[i] = maglev.Member{Addr: ep.Addr, Weight: ep.Weight}
		}
		size := b.Slots
		if size == 0 {
			size = maglev.SizeFor(len(pool))
		}
		t.table = maglev.Build(b.Seed, size, t.members)
		i = len(b.tables)
		if i < keptTables {
			b.tables = append(b.tables, t)
		} else {
			i--
		}
	}
	copy(b.tables[1:i+1], b.tables[:i])
	b.tables[0] = t
	return t.table
}

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
