package dataplane

import (
	"cmp"
	"container/list"
	"math/rand/v2"
	"net/netip"
	"slices"
	"sync"
	"time"

	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/ruleset/maglev"
	"github.com/go-proxier/proxier/tracker"
)

// Algorithm names the way to choose among endpoints. The zero value is [WeightedRoundRobin].
type Algorithm string

// The algorithms. None chooses an endpoint of weight 0, which takes no new connections.
const (
	// WeightedRoundRobin chooses each endpoint in proportion to its weight, as evenly in time as
	// possible: weights 5, 1 and 1 give the order A A B A C A A. This is the "smooth" method of nginx.
	WeightedRoundRobin Algorithm = "weighted-round-robin"
	// RoundRobin chooses the endpoints in turn. It ignores weights except 0.
	RoundRobin Algorithm = "round-robin"
	// LeastConnections chooses the endpoint with the fewest connections and sessions for its
	// weight, and a random one of several equal endpoints.
	LeastConnections Algorithm = "least-connections"
)

const (
	// maxClients bounds the clients of a Service with affinity. So many take some ten megabytes.
	maxClients = 65536
	// maxTables bounds a Service's hash tables: those of its two pools, and tables without an
	// endpoint that cannot be reached.
	maxTables = 4
)

// method is the configuration of a balancer.
type method struct {
	algorithm Algorithm
	affinity  time.Duration // 0 for none
	// hash overrides the algorithm unless it is HashNone. The seed and the sizes of the two
	// pools' tables belong to it.
	hash                     tracker.Hash
	seed                     uint64
	clusterSlots, localSlots int
}

func methodOf(svc *ruleset.Port, a Algorithm, n *ruleset.Node) method {
	m := method{algorithm: a, affinity: svc.Spec.Affinity}
	if h := svc.Hash(); h != tracker.HashNone {
		m.algorithm, m.hash, m.seed = "", h, n.HashSeed
		m.clusterSlots, m.localSlots = svc.HashBuckets(ruleset.TargetCluster), svc.HashBuckets(ruleset.TargetLocal)
	}
	return m
}

// balancer chooses endpoints for the connections to one Service port. It keeps its state by the
// endpoints' addresses, because pools change. Its methods are safe for concurrent use.
type balancer struct {
	load func(netip.AddrPort) int // an endpoint's connections
	now  func() time.Time

	mu sync.Mutex
	method
	// credit is the balance of each endpoint for each pool. Each pick adds every candidate's weight
	// to its credit, chooses the largest credit, and subtracts the sum of the weights from it.
	credit map[ruleset.Target]map[netip.AddrPort]int64
	tables []table // the one used last first
	// clients and recent hold the endpoints of clients, for affinity. The most recent one is first.
	clients map[netip.Addr]*list.Element // of *stay
	recent  list.List
}

// stay is one client's endpoint.
type stay struct {
	client   netip.Addr
	endpoint netip.AddrPort
	last     time.Time
}

// table is a hash table with its parameters.
type table struct {
	target  ruleset.Target
	members []maglev.Member
	*maglev.Table
}

func newBalancer(load func(netip.AddrPort) int) *balancer {
	return &balancer{
		load: load, now: time.Now,
		credit:  map[ruleset.Target]map[netip.AddrPort]int64{},
		clients: map[netip.Addr]*list.Element{},
	}
}

// set sets the method. Clients with affinity keep their endpoints.
func (b *balancer) set(m method) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.method == m {
		return
	}
	b.method, b.tables = m, nil
	clear(b.credit)
	b.trim()
}

// pick returns an endpoint of pool for a new connection from client, or nil if none has a weight
// above 0. pool is the Service's pool for t, or a part of it. The time is proportional to its size.
func (b *balancer) pick(t ruleset.Target, pool []*tracker.Endpoint, client netip.AddrPort) *tracker.Endpoint {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.affinity == 0 {
		return b.choose(t, pool, client)
	}
	b.trim()
	from := client.Addr().Unmap()
	e := b.clients[from]
	var ep *tracker.Endpoint
	if e != nil {
		at := e.Value.(*stay).endpoint
		if i := slices.IndexFunc(pool, func(ep *tracker.Endpoint) bool { return ep.Addr == at }); i >= 0 && pool[i].Weight > 0 {
			ep = pool[i]
		}
	}
	if ep == nil {
		if ep = b.choose(t, pool, client); ep == nil {
			return nil
		}
	}
	if e == nil {
		e = b.recent.PushFront(&stay{client: from})
		b.clients[from] = e
	}
	s := e.Value.(*stay)
	s.endpoint, s.last = ep.Addr, b.now()
	b.recent.MoveToFront(e)
	return ep
}

// trim drops the oldest clients above the limit, and those whose timeout has passed.
func (b *balancer) trim() {
	now := b.now()
	for e := b.recent.Back(); e != nil; e = b.recent.Back() {
		c := e.Value.(*stay)
		if len(b.clients) <= maxClients && now.Sub(c.last) < b.affinity {
			return
		}
		b.recent.Remove(e)
		delete(b.clients, c.client)
	}
}

// choose is pick without affinity.
func (b *balancer) choose(t ruleset.Target, pool []*tracker.Endpoint, client netip.AddrPort) *tracker.Endpoint {
	switch {
	case b.hash == tracker.HashSource:
		return b.hashed(t, pool, maglev.HashAddr(b.seed, client.Addr()))
	case b.hash == tracker.HashSourcePort:
		return b.hashed(t, pool, maglev.HashAddrPort(b.seed, client))
	case b.algorithm == LeastConnections:
		return b.lightest(pool)
	}
	return b.inTurn(t, pool)
}

// hashed returns the endpoint of the table that package nftables would use, and builds the table
// if the pool differs from the last few pools.
func (b *balancer) hashed(target ruleset.Target, pool []*tracker.Endpoint, hash uint32) *tracker.Endpoint {
	pool = pool[:min(len(pool), maglev.MaxSize)]
	same := func(m maglev.Member, ep *tracker.Endpoint) bool { return m.Addr == ep.Addr && m.Weight == ep.Weight }
	i := slices.IndexFunc(b.tables, func(t table) bool { return t.target == target && slices.EqualFunc(t.members, pool, same) })
	if i < 0 {
		t := table{target: target}
		for _, ep := range pool {
			t.members = append(t.members, maglev.Member{Addr: ep.Addr, Weight: ep.Weight})
		}
		// The size is that of the whole pool: another size would send most clients to other endpoints.
		size := b.clusterSlots
		if target == ruleset.TargetLocal {
			size = b.localSlots
		}
		t.Table = maglev.Build(b.seed, cmp.Or(size, maglev.SizeFor(len(pool))), t.members)
		i, b.tables = len(b.tables), append(b.tables, t)
	}
	t := b.tables[i]
	b.tables = slices.Insert(slices.Delete(b.tables, i, i+1), 0, t)
	b.tables = b.tables[:min(len(b.tables), maxTables)]
	if t.Len() == 0 {
		return nil
	}
	return pool[t.Find(hash)]
}

// lightest returns a random one of the endpoints with the fewest connections for their weight. It counts the new
// connection too: otherwise an idle endpoint of weight 1 would equal an idle one of weight 100.
func (b *balancer) lightest(pool []*tracker.Endpoint) (best *tracker.Endpoint) {
	var least uint64 // the connections of best
	equal := 0       // the endpoints that are as good as best
	for _, ep := range pool {
		if ep.Weight == 0 {
			continue
		}
		n := uint64(b.load(ep.Addr) + 1)
		if best != nil {
			switch mine, others := n*uint64(best.Weight), least*uint64(ep.Weight); {
			case mine > others:
				continue
			case mine < others:
				equal = 0
			}
		}
		if equal++; rand.IntN(equal) == 0 {
			best, least = ep, n
		}
	}
	return best
}

// inTurn returns the first endpoint with the largest credit.
func (b *balancer) inTurn(t ruleset.Target, pool []*tracker.Endpoint) (best *tracker.Endpoint) {
	old := b.credit[t]
	credit := old
	if credit == nil || len(old) > len(pool)+len(pool)/2+16 { // endpoints have left the pool
		credit = make(map[netip.AddrPort]int64, len(pool))
	}
	b.credit[t] = credit
	weight := func(ep *tracker.Endpoint) int64 {
		if b.algorithm == RoundRobin {
			return int64(min(ep.Weight, 1))
		}
		return int64(ep.Weight)
	}
	var total int64
	for _, ep := range pool {
		total += weight(ep)
	}
	var most int64
	for _, ep := range pool {
		if ep.Weight == 0 {
			continue
		}
		// Credit from a time of larger weights would take long to balance.
		has := max(-total, min(old[ep.Addr], total)) + weight(ep)
		credit[ep.Addr] = has
		if best == nil || has > most {
			best, most = ep, has
		}
	}
	if best != nil {
		credit[best.Addr] = most - total
	}
	return best
}
