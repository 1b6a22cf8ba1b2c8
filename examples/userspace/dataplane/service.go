package dataplane

import (
	"net/netip"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/go-proxier/proxier/internal/fairshare"
	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/tracker"
)

// service is the state of a Service port: the load balancers, and the connections of its
// endpoints.
type service struct {
	drain time.Duration
	// places holds the places where it has or needs sockets. Only Apply uses it.
	places []place

	now      atomic.Pointer[ruleset.Port] // never nil
	balancer *balancer
	// made counts all connections and sessions of endpoints.
	made atomic.Uint64

	mu        sync.Mutex
	gone      bool
	endpoints map[netip.AddrPort]*endpoint // those with connections or sessions
}

// holder returns the holder of a client's connections and sessions.
func (s *service) holder(client netip.AddrPort) fairshare.Holder {
	k := s.now.Load().Key
	return fairshare.Holder{Namespace: k.Namespace, Service: k.Name, Client: client.Addr()}
}

// endpoint is the load of an endpoint of a Service.
type endpoint struct {
	open  int // TCP connections and UDP sessions
	conns map[*conn]struct{}
	// end is the timer that resets the connections of a removed endpoint, nil for an
	// existing one. drains counts the timers.
	end    *time.Timer
	drains int
}

func newService(svc *ruleset.Port, m method, drain time.Duration) *service {
	s := &service{drain: drain, endpoints: map[netip.AddrPort]*endpoint{}}
	s.balancer = newBalancer(s.load)
	s.set(svc, m)
	return s
}

// set stores a new version of the Service.
func (s *service) set(svc *ruleset.Port, m method) {
	s.balancer.set(m)
	s.mu.Lock()
	defer s.mu.Unlock()
	s.gone = false
	s.now.Store(svc)
	s.updateDrains()
}

func (s *service) remove() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.gone = true
	s.updateDrains()
}

// pick chooses an endpoint that was not tried. It returns nil if all were tried.
func (s *service) pick(t ruleset.Target, from netip.AddrPort, tried []netip.AddrPort) *tracker.Endpoint {
	pool := s.now.Load().Pool(t)
	if len(tried) != 0 {
		pool = slices.DeleteFunc(slices.Clone(pool), func(ep *tracker.Endpoint) bool {
			return slices.Contains(tried, ep.Addr)
		})
	}
	return s.balancer.pick(t, pool, from)
}

// load returns the number of connections and sessions of an endpoint.
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
	if e.end == nil && !s.has(at) { // removed since it was chosen
		s.updateDrains()
	}
}

// attach registers an entered connection to be reset when its endpoint is removed and
// drained. It reports false if that has already happened.
func (s *service) attach(at netip.AddrPort, c *conn) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.drain < 0 && !s.has(at) {
		return false
	}
	s.endpoints[at].conns[c] = struct{}{}
	return true
}

// leave reverses enter, and attach of c if that is not nil.
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

// has reports whether the Service has an endpoint at the address, whatever its conditions.
func (s *service) has(at netip.AddrPort) bool {
	return !s.gone && slices.ContainsFunc(s.now.Load().Endpoints, func(ep *tracker.Endpoint) bool { return ep.Addr == at })
}

func serves(svc *ruleset.Port, at netip.AddrPort) bool {
	return slices.ContainsFunc(svc.Endpoints, func(ep *tracker.Endpoint) bool { return ep.Addr == at && ep.Serving })
}

// updateDrains starts the drain of removed endpoints and stops that of endpoints that are
// back. The caller holds s.mu.
func (s *service) updateDrains() {
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

// cut resets the connections of a drained endpoint, unless the endpoint is back.
func (s *service) cut(e *endpoint, drain int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if e.end == nil || e.drains != drain {
		return
	}
	for c := range e.conns {
		c.cut()
	}
	e.end = nil // later connections start a new drain
}
