package balance

import (
	"net/netip"
	"slices"
	"sync"

	"github.com/go-proxier/proxier/ruleset/maglev"
	"github.com/go-proxier/proxier/tracker"
)

// keptTables is how many tables a [Maglev] keeps: that of the whole pool, and those
// without an endpoint that was tried in vain.
const keptTables = 4

// Maglev chooses by a table of package maglev: which endpoint follows from the pool,
// the Seed and the client, and from nothing else. So proxies with the same Seed
// agree, and with them [ruleset.Service.Maglev] and what follows it. The zero value
// is ready for use.
type Maglev struct {
	// Seed is [ruleset.Node]'s HashSeed.
	Seed uint64
	// Slots is how many slots the table has at least (see [maglev.SizeAtLeast]); 0 is
	// as many as suit the pool. Give the whole pool's number, where Pick is given
	// parts of it: another size sends most clients to other endpoints.
	Slots int
	// Port: the client's port counts as well as its address.
	Port bool

	mu     sync.Mutex
	tables []table // the one used last first
}

// table is a table and what it was made of.
type table struct {
	members []maglev.Member
	table   *maglev.Table
}

// Pick takes a step for each endpoint, and makes a table when the pool is another
// than the last few ones.
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
