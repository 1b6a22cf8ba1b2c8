package dataplane

import (
	"net/netip"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/go-proxier/proxier/examples/userspace/balance"
	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/tracker"
)

// service is a Service port at work: how its endpoints are chosen, and what they
// have to do.
type service struct {
	drain time.Duration
	// places is where it has sockets or wants them; only Apply uses it.
	places []place

	now     atomic.Pointer[ruleset.Service] // never nil
	choice  atomic.Pointer[choice]
	current atomic.Int64 // TCP connections
	// made is how many connections and sessions an endpoint has had.
	made atomic.Uint64

	mu        sync.Mutex
	gone      bool
	endpoints map[netip.AddrPort]*endpoint // those with anything to do
}

// choice is how a Service's endpoints are chosen.
type choice struct {
	method
	affinity       *balance.Affinity // nil for none
	cluster, local balance.Balancer
}

// method is what a choice follows from.
type method struct {
	algorithm balance.Algorithm
	timeout   time.Duration // of affinity
	// hash goes before the algorithm, if it is not HashNone. The rest is for it: the
	// seed, and how many slots the tables of the two pools have.
	hash                     tracker.Hash
	seed                     uint64
	clusterSlots, localSlots int
}

// methodOf a Service with an algorithm, on a node.
func methodOf(svc *ruleset.Service, a balance.Algorithm, n *ruleset.Node) method {
	m := method{algorithm: a, timeout: svc.Port.Affinity}
	if h := svc.Hash(); h != tracker.HashNone {
		m.algorithm, m.hash, m.seed = 0, h, n.HashSeed
		m.clusterSlots, m.localSlots = svc.HashSlots(ruleset.ToCluster), svc.HashSlots(ruleset.ToLocal)
	}
	return m
}

// balancer returns a new Balancer for a pool whose table has so many slots, if it
// has one.
func (m method) balancer(load balance.Load, slots int) balance.Balancer {
	if m.hash != tracker.HashNone {
		return &balance.Maglev{Seed: m.seed, Slots: slots, Port: m.hash == tracker.HashSourcePort}
	}
	return m.algorithm.New(load)
}

// endpoint is what an endpoint of a Service has to do.
type endpoint struct {
	open  int // TCP connections and UDP sessions
	conns map[*conn]struct{}
	// end cuts the connections of an endpoint that is gone, nil for one that is
	// not; drains counts how often one was set.
	end    *time.Timer
	drains int
}

func newService(svc *ruleset.Service, m method, drain time.Duration) *service {
	s := &service{drain: drain, endpoints: map[netip.AddrPort]*endpoint{}}
	s.set(svc, m)
	return s
}

// set takes over a new version.
func (s *service) set(svc *ruleset.Service, m method) {
	s.choose(m)
	s.mu.Lock()
	defer s.mu.Unlock()
	s.gone = false
	s.now.Store(svc)
	s.settle()
}

// remove takes the Service away, with all its endpoints.
func (s *service) remove() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.gone = true
	s.settle()
}

// choose sets how endpoints are chosen. What a balancer has learnt is kept as long
// as it stays the same.
func (s *service) choose(m method) {
	old := s.choice.Load()
	if old != nil && old.method == m {
		return
	}
	c := &choice{method: m}
	if old != nil && old.affinity != nil && m.timeout != 0 {
		c.affinity = old.affinity
		c.affinity.SetTimeout(m.timeout)
	} else if m.timeout != 0 {
		c.affinity = balance.NewAffinity(m.timeout, 0)
	}
	c.cluster, c.local = m.balancer(s.load, m.clusterSlots), m.balancer(s.load, m.localSlots)
	if c.affinity != nil {
		c.cluster, c.local = c.affinity.Wrap(c.cluster), c.affinity.Wrap(c.local)
	}
	s.choice.Store(c)
}

// pick chooses an endpoint that was not tried, nil if there is none.
func (s *service) pick(t ruleset.Target, from netip.AddrPort, tried []netip.AddrPort) *tracker.Endpoint {
	pool := s.now.Load().Pool(t)
	if len(tried) != 0 {
		pool = slices.DeleteFunc(slices.Clone(pool), func(ep *tracker.Endpoint) bool {
			return slices.Contains(tried, ep.Addr)
		})
	}
	c := s.choice.Load()
	if t == ruleset.ToLocal {
		return c.local.Pick(pool, from)
	}
	return c.cluster.Pick(pool, from)
}

// load is how much an endpoint has to do.
func (s *service) load(at netip.AddrPort) int {
	s.mu.Lock()
	defer s.mu.Unlock()
	if e := s.endpoints[at]; e != nil {
		return e.open
	}
	return 0
}

// enter counts a connection or session of an endpoint.
func (s *service) enter(at netip.AddrPort) {
	s.mu.Lock()
	defer s.mu.Unlock()
	e := s.endpoints[at]
	if e == nil {
		e = &endpoint{conns: map[*conn]struct{}{}}
		s.endpoints[at] = e
	}
	e.open++
	if e.end == nil && !s.has(at) { // gone since it was chosen
		s.settle()
	}
}

// attach has a connection that was entered cut when the endpoint is gone and
// drained. It reports false if that is so already.
func (s *service) attach(at netip.AddrPort, c *conn) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.drain < 0 && !s.has(at) {
		return false
	}
	s.endpoints[at].conns[c] = struct{}{}
	return true
}

// leave takes back an enter, and an attach of c, which may be nil.
func (s *service) leave(at netip.AddrPort, c *conn) {
	s.mu.Lock()
	defer s.mu.Unlock()
	e := s.endpoints[at]
	delete(e.conns, c)
	if e.open--; e.open == 0 {
		if e.end != nil {
			e.end.Stop()
		}
		delete(s.endpoints, at)
	}
}

// has reports whether at is an endpoint now, whatever its conditions.
func (s *service) has(at netip.AddrPort) bool {
	return !s.gone && slices.ContainsFunc(s.now.Load().Endpoints, func(ep *tracker.Endpoint) bool { return ep.Addr == at })
}

// serves reports whether svc has an endpoint that answers what it was sent
// before.
func serves(svc *ruleset.Service, at netip.AddrPort) bool {
	return slices.ContainsFunc(svc.Endpoints, func(ep *tracker.Endpoint) bool { return ep.Addr == at && ep.Serving })
}

// settle has the endpoints that are gone end, and those that are back go on. The
// caller holds s.mu.
func (s *service) settle() {
	if len(s.endpoints) == 0 {
		return
	}
	known := make(map[netip.AddrPort]struct{})
	if !s.gone {
		for _, ep := range s.now.Load().Endpoints {
			known[ep.Addr] = struct{}{}
		}
	}
	for at, e := range s.endpoints {
		_, here := known[at]
		switch {
		case here && e.end != nil:
			e.end.Stop()
			e.end = nil
		case !here && e.end == nil:
			e.drains++
			this := e.drains
			e.end = time.AfterFunc(max(0, s.drain), func() { s.cut(e, this) })
		}
	}
}

// cut ends the connections of an endpoint that is drained, unless it is back.
func (s *service) cut(e *endpoint, drain int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if e.end == nil || e.drains != drain {
		return
	}
	for c := range e.conns {
		c.cut()
	}
	e.end = nil // those that are still to come begin anew
}
