package dataplane

import (
	"context"
	"net/netip"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/go-proxier/proxier/internal/fairshare"
	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/tracker"
)

// service is the state of a Service port: the load balancer, and the load of its endpoints.
type service struct {
	key   tracker.Key
	drain time.Duration
	// rules holds its rules. In Apply, next and nextRules are what a change makes of it. Only Apply uses these fields.
	rules     []*rule
	next      *ruleset.Port
	nextRules []*rule

	now      atomic.Pointer[ruleset.Port] // nil only in the Apply that adds it
	balancer *balancer
	// made counts all connections and sessions of endpoints.
	made atomic.Uint64

	mu        sync.Mutex
	endpoints map[netip.AddrPort]*endpoint // those with connections or sessions
}

// holder returns the holder of a client's connections and sessions.
func (s *service) holder(client netip.AddrPort) fairshare.Holder {
	return fairshare.Holder{Namespace: s.key.Namespace, Service: s.key.Name, Client: client.Addr()}
}

// endpoint is the load of an endpoint of a Service. One that was removed and has drained is another one when it returns.
type endpoint struct {
	service *service
	addr    netip.AddrPort
	open    int // TCP connections and UDP sessions
	// drained ends when the endpoint was removed and has drained, or has no connections.
	drained context.Context
	cancel  context.CancelFunc
	// end is the timer of a removed endpoint's drain, nil for an existing one.
	end *time.Timer
}

func newService(k tracker.Key, drain time.Duration) *service {
	s := &service{key: k, drain: drain, endpoints: map[netip.AddrPort]*endpoint{}}
	s.balancer = newBalancer(s.load)
	return s
}

// set stores a new version of the Service. It starts the drain of removed endpoints and stops that of endpoints that are
// back.
func (s *service) set(svc *ruleset.Port) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.now.Store(svc)
	if len(s.endpoints) == 0 {
		return
	}
	known := make(map[netip.AddrPort]struct{}, len(svc.Endpoints))
	for _, ep := range svc.Endpoints {
		known[ep.Addr] = struct{}{}
	}
	for at, e := range s.endpoints {
		if _, here := known[at]; !here {
			e.startDrain()
		} else if e.end != nil {
			e.end.Stop()
			e.end = nil
		}
	}
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

// enter counts a connection or session of an endpoint, which must leave.
func (s *service) enter(at netip.AddrPort) *endpoint {
	s.mu.Lock()
	defer s.mu.Unlock()
	e := s.endpoints[at]
	if e == nil || e.drained.Err() != nil {
		e = &endpoint{service: s, addr: at}
		e.drained, e.cancel = context.WithCancel(context.Background())
		s.endpoints[at] = e
	}
	e.open++
	if !slices.ContainsFunc(s.now.Load().Endpoints, func(ep *tracker.Endpoint) bool { return ep.Addr == at }) {
		e.startDrain() // removed since it was chosen
	}
	return e
}

func (e *endpoint) leave() {
	e.service.mu.Lock()
	defer e.service.mu.Unlock()
	if e.open--; e.open != 0 {
		return
	}
	e.cancel()
	if e.end != nil {
		e.end.Stop()
	}
	if e.service.endpoints[e.addr] == e {
		delete(e.service.endpoints, e.addr)
	}
}

// startDrain starts the drain, if it has not started. The caller holds the lock.
func (e *endpoint) startDrain() {
	if e.end == nil {
		e.end = time.AfterFunc(max(0, e.service.drain), e.cancel)
	}
	if e.service.drain < 0 {
		e.cancel()
	}
}

func serves(svc *ruleset.Port, at netip.AddrPort) bool {
	return slices.ContainsFunc(svc.Endpoints, func(ep *tracker.Endpoint) bool { return ep.Addr == at && ep.Serving })
}
