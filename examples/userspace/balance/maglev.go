package balance

import (
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
