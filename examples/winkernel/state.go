package winkernel

import (
	"context"
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"github.com/go-proxier/proxier/ruleset/dataplane"
	"github.com/go-proxier/proxier/tracker"
)

// state holds the service's objects: read from it, and kept up to date by a Backend's own writes.
type state struct {
	network   Network
	endpoints map[string]Endpoint
	at        map[netip.Addr]addressed
	lbs       map[Frontend]LoadBalancer
	// uses and vips count the load balancers by endpoint ID and by address.
	uses map[string]int
	vips map[netip.Addr]int
	// idle has the IDs of the endpoints that may have lost their last load balancer, or have none yet.
	idle map[string]bool
	// broken holds the IDs of load balancers without a frontend, and of second ones.
	broken []string
	// root is the ID of the root endpoint, or "".
	root string
	// macs counts the endpoints by hardware address.
	macs map[string]int
}

// addressed holds the IDs of the endpoints with an address in the state's network, or "". The
// service may have a local and a remote one.
type addressed struct{ local, remote string }

func (c *Config) read() (*state, error) {
	s := &state{lbs: map[Frontend]LoadBalancer{}, uses: map[string]int{}, vips: map[netip.Addr]int{}, idle: map[string]bool{}}
	var err error
	if s.network, err = c.HNS.Network(c.Network); err != nil {
		return nil, fmt.Errorf("winkernel: cannot read network %q: %w", c.Network, err)
	}
	if err := s.readEndpoints(c); err != nil {
		return nil, err
	}
	lbs, err := c.HNS.LoadBalancers()
	if err != nil {
		return nil, fmt.Errorf("winkernel: cannot list load balancers: %w", err)
	}
	// The service returns them in any order. A fixed one makes the choice among equal
	// frontends repeatable.
	slices.SortFunc(lbs, func(a, b LoadBalancer) int { return strings.Compare(a.ID, b.ID) })
	for _, lb := range lbs {
		if !s.owns(&lb) {
			continue
		}
		if _, second := s.lbs[lb.Frontend]; second || lb.Frontend == (Frontend{}) {
			s.broken = append(s.broken, lb.ID)
			continue
		}
		s.setLB(lb)
	}
	return s, nil
}

func (s *state) setLB(lb LoadBalancer) {
	s.deleteLB(lb.Frontend)
	s.lbs[lb.Frontend] = lb
	s.vips[lb.Frontend.VIP]++
	for _, id := range lb.Endpoints {
		s.uses[id]++
	}
}

// deleteLB removes a load balancer.
func (s *state) deleteLB(f Frontend) {
	lb, ok := s.lbs[f]
	if !ok {
		return
	}
	delete(s.lbs, f)
	decrement(s.vips, f.VIP)
	for _, id := range lb.Endpoints {
		decrement(s.uses, id)
		s.idle[id] = true
	}
	s.idle[s.at[f.VIP].remote] = true
}

func decrement[K comparable](m map[K]int, k K) {
	if m[k]--; m[k] == 0 {
		delete(m, k)
	}
}

// inUse reports whether a load balancer has an endpoint, or is at the address of a vip.
func (s *state) inUse(e *Endpoint, vip bool) bool {
	return s.uses[e.ID] != 0 || vip && s.vips[e.Addrs[0]] != 0
}

// owns reports whether a load balancer belongs to the node's service proxy: none of its
// endpoints is in another network. It has no other mark.
func (s *state) owns(lb *LoadBalancer) bool {
	return !slices.ContainsFunc(lb.Endpoints, func(id string) bool {
		e, ok := s.endpoints[id]
		return ok && e.Network != s.network.ID
	})
}

// readEndpoints replaces the endpoints of the state by those of the service.
func (s *state) readEndpoints(c *Config) error {
	list, err := c.HNS.Endpoints()
	if err != nil {
		return fmt.Errorf("winkernel: cannot list endpoints: %w", err)
	}
	s.endpoints, s.at, s.macs, s.root = make(map[string]Endpoint, len(list)), make(map[netip.Addr]addressed, len(list)), map[string]int{}, ""
	for _, e := range list {
		s.add(e)
		if e.Name == c.RootEndpoint && e.Name != "" {
			s.root = e.ID
		}
	}
	return nil
}

func (s *state) add(e Endpoint) {
	s.endpoints[e.ID], s.idle[e.ID] = e, true
	s.macs[e.MAC]++
	if e.Network != s.network.ID {
		return
	}
	for _, a := range e.Addrs {
		at := s.at[a]
		if e.Remote {
			at.remote = e.ID
		} else {
			at.local = e.ID
		}
		s.at[a] = at
	}
}

func (s *state) remove(id string) {
	for _, a := range s.endpoints[id].Addrs {
		at := s.at[a]
		switch id {
		case at.local:
			at.local = ""
		case at.remote:
			at.remote = ""
		}
		s.at[a] = at
		if at == (addressed{}) {
			delete(s.at, a)
		}
	}
	s.macs[s.endpoints[id].MAC]--
	delete(s.endpoints, id)
}

// differs describes the first difference that matters between what a Backend wrote and what
// the service has now, or returns "". Other endpoints of pods, and other networks, do not
// matter. waiting holds the addresses of pods that had no endpoint.
func (s *state) differs(now *state, p planner, waiting map[tracker.Key][]netip.Addr) (what string, f tracker.Family) {
	if s.network.ID != now.network.ID {
		return fmt.Sprintf("network %q was replaced", s.network.Name), p.families()
	}
	if s.root != now.root && p.config.ForwardHealthCheckVIP {
		return fmt.Sprintf("endpoint %q was made, replaced or deleted", p.config.RootEndpoint), p.families()
	}
	if len(now.broken) != 0 {
		return "a load balancer has no port or has the frontend of another", p.families()
	}
	for front, lb := range s.lbs {
		if is, ok := now.lbs[front]; !ok || is.ID != lb.ID || !is.equal(&lb) {
			return "load balancer " + front.String() + " was changed or deleted", front.Family
		}
	}
	for front := range now.lbs {
		if _, ok := s.lbs[front]; !ok {
			return "load balancer " + front.String() + " was added", front.Family
		}
	}
	for id, e := range s.endpoints {
		if !p.owns(&e) {
			continue
		}
		if is, ok := now.endpoints[id]; !ok || !slices.Equal(is.Addrs, e.Addrs) {
			return fmt.Sprintf("endpoint %v was deleted", e.Addrs[0]), tracker.FamilyOf(e.Addrs[0])
		}
		if now := (planner{p.config, &now.network}); p.isRemotePod(&e) && now.remoteEndpoint(e.Addrs[0]).Provider != e.Provider {
			return fmt.Sprintf("endpoint %v is on another node", e.Addrs[0]), tracker.FamilyOf(e.Addrs[0])
		}
	}
	// A pod's endpoint that a load balancer has was compared with the load balancer, unless
	// the service still names the deleted one there.
	for _, lb := range s.lbs {
		for _, id := range lb.Endpoints {
			if _, ok := now.endpoints[id]; !ok {
				return "an endpoint of load balancer " + lb.Frontend.String() + " was deleted", lb.Frontend.Family
			}
		}
	}
	for _, list := range waiting {
		for _, a := range list {
			if now.at[a] != s.at[a] {
				return fmt.Sprintf("endpoint %v was made or deleted", a), tracker.FamilyOf(a)
			}
		}
	}
	if now.network.Type == Overlay && now.at[p.config.SourceVIP].local == "" {
		return fmt.Sprintf("endpoint %v was deleted", p.config.SourceVIP), tracker.IPv4
	}
	return "", 0
}

// families returns the family of a single-stack node, and 0 for both.
func (p planner) families() tracker.Family {
	if len(p.config.NodeIPs) == 1 {
		return tracker.FamilyOf(p.config.NodeIPs[0])
	}
	return 0
}

// Lookup returns the service's treatment of a connection's first packet. It needs no Backend
// and writes nothing. Load balancers do not have the names of Services, so
// [dataplane.Found].Service is "". The error wraps [dataplane.ErrNoRules] if there is no load
// balancer. Lookup lists all of them.
func Lookup(ctx context.Context, c Config, q dataplane.Query) (dataplane.Found, error) {
	_, s, err := c.inspect(ctx)
	switch {
	case err != nil:
		return dataplane.Found{}, err
	case len(s.lbs) == 0:
		return dataplane.Found{}, dataplane.ErrNoRules
	}
	to := q.Packet.To
	f := Frontend{VIP: to.Addr(), Port: to.Port(), Protocol: q.Packet.Protocol, Family: tracker.FamilyOf(to.Addr())}
	if q.NodePort {
		f.VIP = netip.Addr{}
	}
	lb, ok := s.lbs[f]
	if !ok {
		return dataplane.Found{}, nil
	}
	out := dataplane.Found{Entry: true, Where: "load balancer " + lb.ID}
	for _, id := range lb.Endpoints {
		for _, a := range s.endpoints[id].Addrs {
			if tracker.FamilyOf(a) == f.Family {
				out.Endpoints = append(out.Endpoints, netip.AddrPortFrom(a, lb.InternalPort))
			}
		}
	}
	slices.SortFunc(out.Endpoints, netip.AddrPort.Compare)
	out.Endpoints = slices.Compact(out.Endpoints)
	return out, nil
}
