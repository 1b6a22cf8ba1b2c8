package winkernel

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"github.com/go-proxier/proxier/ruleset/driver"
	"github.com/go-proxier/proxier/tracker"
)

// state holds the service's objects and their users: read from it, and kept up to date by a Backend's own writes.
type state struct {
	planner
	endpoints map[string]Endpoint
	at        map[netip.Addr]addressed
	// macs counts the endpoints by hardware address.
	macs map[string]int
	// root is the ID of the root endpoint, or "".
	root string
	lbs  map[Frontend]LoadBalancer
	// broken holds the IDs of load balancers without a frontend, and of second ones.
	broken []string
	// services records which Services want a load balancer, and users which load balancers have or want an
	// endpoint, by its ID. Endpoints that a Backend may not delete are not installed there.
	services driver.Ledger[tracker.Key, Frontend]
	users    driver.Ledger[Frontend, string]
	// waiting holds the addresses of pods that the network plugin must make an endpoint for,
	// or delete one, and those of pods that are left out until there is an endpoint. Of the
	// zero Key it is the source VIP of an overlay.
	waiting map[tracker.Key][]netip.Addr
}

// addressed holds the IDs of the endpoints with an address in the state's network, or "". The
// service may have a local and a remote one.
type addressed struct{ local, remote string }

func (c *Config) read() (*state, error) {
	n, err := c.readNetwork()
	if err != nil {
		return nil, err
	}
	s := &state{planner: planner{c, n}, lbs: map[Frontend]LoadBalancer{}, waiting: map[tracker.Key][]netip.Addr{}}
	if err := s.readEndpoints(); err != nil {
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
		// One with an endpoint in another network is not the node's service proxy's. There is no other mark.
		if slices.ContainsFunc(lb.Endpoints, func(id string) bool {
			e, ok := s.endpoints[id]
			return ok && e.Network != n.ID
		}) {
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

func (c *Config) readNetwork() (Network, error) {
	n, err := c.HNS.Network(c.Network)
	if err != nil {
		err = fmt.Errorf("winkernel: cannot read network %q: %w", c.Network, err)
	}
	return n, err
}

// readEndpoints replaces the endpoints of the state by those of the service.
func (s *state) readEndpoints() error {
	list, err := s.config.HNS.Endpoints()
	if err != nil {
		return fmt.Errorf("winkernel: cannot list endpoints: %w", err)
	}
	s.endpoints, s.at, s.macs, s.root = make(map[string]Endpoint, len(list)), make(map[netip.Addr]addressed, len(list)), map[string]int{}, ""
	for _, e := range list {
		s.add(e)
		if e.Name == s.config.RootEndpoint && e.Name != "" {
			s.root = e.ID
		}
	}
	return nil
}

func (s *state) add(e Endpoint) {
	s.endpoints[e.ID] = e
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
	if s.owns(&e) {
		s.users.Installed(e.ID)
	}
}

// remove removes an endpoint that the Backend owns.
func (s *state) remove(e Endpoint) {
	delete(s.endpoints, e.ID)
	s.macs[e.MAC]--
	a := e.Addrs[0]
	if at := s.at[a]; at.remote == e.ID {
		s.at[a] = addressed{local: at.local}
	}
	if s.at[a] == (addressed{}) {
		delete(s.at, a)
	}
	s.users.Removed(e.ID)
}

func (s *state) setLB(lb LoadBalancer) {
	s.lbs[lb.Frontend] = lb
	s.services.Installed(lb.Frontend)
	s.claim(lb.Frontend, nil)
}

func (s *state) deleteLB(f Frontend) {
	delete(s.lbs, f)
	s.services.Removed(f)
	s.claim(f, nil)
}

// claim makes the load balancer of a frontend the user of the endpoints that it has, of those that it wants, and
// of the one at its VIP.
func (s *state) claim(f Frontend, wanted []string) {
	uses := slices.Concat(s.lbs[f].Endpoints, wanted)
	if e, ok := s.endpoints[s.at[f.VIP].remote]; ok && len(uses) != 0 && s.isVIP(&e) {
		uses = append(uses, e.ID)
	}
	slices.Sort(uses)
	for id := range s.users.Items(f) {
		if _, ok := slices.BinarySearch(uses, id); !ok {
			s.users.Release(f, id)
		}
	}
	for _, id := range uses {
		s.users.Claim(f, id)
	}
}

// differs describes the first difference that matters between what a Backend wrote and what
// the service has now, or returns "". Other endpoints of pods, and other networks, do not
// matter.
func (s *state) differs(now *state) (what string, f tracker.Family) {
	if s.network.ID != now.network.ID {
		return fmt.Sprintf("network %q was replaced", s.network.Name), s.families()
	}
	if s.root != now.root && s.config.ForwardHealthCheckVIP {
		return fmt.Sprintf("endpoint %q was made, replaced or deleted", s.config.RootEndpoint), s.families()
	}
	if len(now.broken) != 0 {
		return "a load balancer has no port or has the frontend of another", s.families()
	}
	for front, lb := range s.lbs {
		if is, ok := now.lbs[front]; !ok || is.ID != lb.ID || !is.equal(&lb) {
			return "load balancer " + front.String() + " was changed or deleted", front.Family
		}
		// The service may still name an endpoint that was deleted.
		if slices.ContainsFunc(lb.Endpoints, func(id string) bool { _, ok := now.endpoints[id]; return !ok }) {
			return "an endpoint of load balancer " + front.String() + " was deleted", front.Family
		}
	}
	for front := range now.lbs {
		if _, ok := s.lbs[front]; !ok {
			return "load balancer " + front.String() + " was added", front.Family
		}
	}
	for id, e := range s.endpoints {
		if !s.owns(&e) {
			continue
		}
		a := e.Addrs[0]
		if is, ok := now.endpoints[id]; !ok || !slices.Equal(is.Addrs, e.Addrs) {
			return fmt.Sprintf("endpoint %v was deleted", a), tracker.FamilyOf(a)
		}
		if s.isRemotePod(&e) && now.remoteEndpoint(a).Provider != e.Provider {
			return fmt.Sprintf("endpoint %v is on another node", a), tracker.FamilyOf(a)
		}
	}
	for _, list := range s.waiting {
		for _, a := range list {
			if now.at[a] != s.at[a] {
				return fmt.Sprintf("endpoint %v was made or deleted", a), tracker.FamilyOf(a)
			}
		}
	}
	return "", 0
}
