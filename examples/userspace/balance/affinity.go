package balance

import (
	"container/list"
	"net/netip"
	"slices"
	"sync"
	"time"

	"github.com/go-proxier/proxier/tracker"
)

// DefaultAffinityClients is the default limit of an [Affinity]'s clients. So many take some
// ten megabytes.
const DefaultAffinityClients = 65536

// Affinity stores the endpoint of each client (a Service's sessionAffinity ClientIP). One
// Affinity can wrap several Balancers, such as those of a Service's two pools. Its methods
// are safe for concurrent use.
type Affinity struct {
	mu      sync.Mutex
	timeout time.Duration
	max     int
	now     func() time.Time
	clients map[netip.Addr]*list.Element // of *stay
	recent  list.List                    // the most recent first
}

// stay is one client's endpoint.
type stay struct {
	client   netip.Addr
	endpoint netip.AddrPort
	last     time.Time
}

// NewAffinity returns an Affinity that stores a client for timeout after its last pick. With
// a timeout of 0 or less it stores no client. With more than max clients it drops the least
// recently used one. A max of 0 means [DefaultAffinityClients].
func NewAffinity(timeout time.Duration, max int) *Affinity {
	if max <= 0 {
		max = DefaultAffinityClients
	}
	return &Affinity{timeout: timeout, max: max, now: time.Now, clients: map[netip.Addr]*list.Element{}}
}

// SetTimeout replaces the timeout, even for stored clients.
func (a *Affinity) SetTimeout(d time.Duration) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.timeout = d
}

// Len returns the number of stored clients, which may include clients whose timeout has
// passed.
func (a *Affinity) Len() int {
	a.mu.Lock()
	defer a.mu.Unlock()
	return len(a.clients)
}

// Wrap returns a Balancer that picks the client's stored endpoint if that is in the pool and
// has a weight. Otherwise it picks and stores next's choice. It calls next with the Affinity
// locked; next must not use the Affinity.
func (a *Affinity) Wrap(next Balancer) Balancer { return &sticky{a, next} }

type sticky struct {
	affinity *Affinity
	next     Balancer
}

func (s *sticky) Pick(pool []*tracker.Endpoint, from netip.AddrPort) *tracker.Endpoint {
	a := s.affinity
	a.mu.Lock()
	defer a.mu.Unlock()
	client := from.Addr().Unmap()
	now := a.now()
	e := a.clients[client]
	if e != nil {
		c := e.Value.(*stay)
		if now.Sub(c.last) < a.timeout {
			i := slices.IndexFunc(pool, func(ep *tracker.Endpoint) bool { return ep.Addr == c.endpoint })
			if i >= 0 && pool[i].Weight > 0 {
				c.last = now
				a.recent.MoveToFront(e)
				return pool[i]
			}
		}
	}
	ep := s.next.Pick(pool, from)
	switch {
	case ep == nil:
	case e != nil:
		e.Value = &stay{client, ep.Addr, now}
		a.recent.MoveToFront(e)
	case a.timeout > 0:
		a.clients[client] = a.recent.PushFront(&stay{client, ep.Addr, now})
	}
	a.trim(now)
	return ep
}

// trim drops clients above the limit, and those whose timeout has passed.
func (a *Affinity) trim(now time.Time) {
	for e := a.recent.Back(); e != nil; e = a.recent.Back() {
		c := e.Value.(*stay)
		if len(a.clients) <= a.max && now.Sub(c.last) < a.timeout {
			return
		}
		a.recent.Remove(e)
		delete(a.clients, c.client)
	}
}
