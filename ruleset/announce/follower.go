package announce

import (
	"context"
	"maps"
	"net/netip"
	"slices"
	"sync"

	"k8s.io/apimachinery/pkg/types"

	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/tracker"
)

// Address is an external or load-balancer IP that Services have.
type Address struct {
	// Addr is the address.
	Addr netip.Addr
	// Serves reports whether the node should get the packets to Addr: each of the Services
	// serves there. If one of them does not, its packets are better off at another node.
	Serves bool
	// Services are the Services that have the address, by name. They are none if the last one
	// has lost it.
	Services []Service
}

// Service is a Service at an address.
type Service struct {
	// Name is the name of the Service.
	Name types.NamespacedName
	// Serves reports whether the node serves a port of the Service at the address:
	//
	//   - With externalTrafficPolicy Local, the node has a ready endpoint. One that terminates still
	//     gets the packets that arrive, but the node should get no more of them, as its
	//     health-check node port says, too.
	//   - With policy Cluster, the Service has an endpoint that gets packets. If all endpoints
	//     terminate, no node would be better.
	//
	// A port that is refused, dropped or passed on ([ruleset.TargetPass]) is not served.
	Serves bool
	// Ports are the ports of the Service that have the address, by key. They have what the
	// Service says of itself ([ruleset.Port].Spec), such as an Extension by a hook.
	Ports []*ruleset.Port
}

// Follower is a [ruleset.Backend] that holds the addresses. [New] makes one. Its methods may be called
// concurrently.
type Follower struct {
	changed func(Address)

	mu sync.Mutex
	// ports holds the ports of each address.
	ports map[netip.Addr]map[tracker.Key]*ruleset.Port
	// told is what changed was last called with.
	told map[netip.Addr]Address
}

// New returns a Follower. changed, unless it is nil, is called with each address whose Services or their
// Serves have changed, in the order of the addresses, from the goroutine of Apply. It must not call the cursor. It
// is not called for other changes of a Service; see [Follower.All].
func New(changed func(Address)) *Follower {
	return &Follower{changed: changed, ports: map[netip.Addr]map[tracker.Key]*ruleset.Port{}, told: map[netip.Addr]Address{}}
}

// Limits implements [ruleset.Limiter]: Services with ranges of ports count as others.
func (f *Follower) Limits(tracker.Family) ruleset.Limits {
	return ruleset.Limits{PortRanges: ruleset.PortRangesShifted}
}

// Apply implements [ruleset.Backend]. It never fails. The cost is that of the changed ports and of all ports at
// their addresses.
func (f *Follower) Apply(_ context.Context, d *ruleset.Delta) error {
	f.mu.Lock()
	touched := map[netip.Addr]bool{}
	if d.Full {
		for a := range f.ports {
			touched[a] = true
		}
		clear(f.ports)
	}
	for i := range d.Changes {
		c := &d.Changes[i]
		for a := range addresses(c.Old) {
			touched[a] = true
			delete(f.ports[a], c.Key)
		}
		for a := range addresses(c.New) {
			touched[a] = true
			if f.ports[a] == nil {
				f.ports[a] = map[tracker.Key]*ruleset.Port{}
			}
			f.ports[a][c.Key] = c.New
		}
	}
	var news []Address
	for _, addr := range slices.SortedFunc(maps.Keys(touched), netip.Addr.Compare) {
		was, now := f.told[addr], f.at(addr)
		if len(now.Services) == 0 {
			delete(f.ports, addr)
			delete(f.told, addr)
		} else {
			f.told[addr] = now
		}
		if !slices.EqualFunc(was.Services, now.Services, func(a, b Service) bool { return a.Name == b.Name && a.Serves == b.Serves }) {
			news = append(news, now)
		}
	}
	f.mu.Unlock()
	if f.changed != nil {
		for _, a := range news {
			f.changed(a)
		}
	}
	return nil
}

// All returns every address, sorted, with the current Ports.
func (f *Follower) All() []Address {
	f.mu.Lock()
	defer f.mu.Unlock()
	out := []Address{}
	for _, a := range slices.SortedFunc(maps.Keys(f.ports), netip.Addr.Compare) {
		out = append(out, f.at(a))
	}
	return out
}

// at returns the state of an address.
func (f *Follower) at(addr netip.Addr) Address {
	out := Address{Addr: addr}
	for _, key := range slices.SortedFunc(maps.Keys(f.ports[addr]), tracker.Key.Compare) {
		p := f.ports[addr][key]
		if n := len(out.Services); n == 0 || out.Services[n-1].Name != key.NamespacedName {
			out.Services = append(out.Services, Service{Name: key.NamespacedName})
		}
		s := &out.Services[len(out.Services)-1]
		s.Ports = append(s.Ports, p)
		s.Serves = s.Serves || serves(p, addr)
	}
	out.Serves = len(out.Services) != 0 && !slices.ContainsFunc(out.Services, func(s Service) bool { return !s.Serves })
	return out
}

// serves reports whether the node serves a port at an address.
func serves(p *ruleset.Port, addr netip.Addr) bool {
	for i := range p.Frontends {
		fe := &p.Frontends[i]
		if fe.Addr != addr {
			continue
		}
		if pool := p.Pool(fe.Target); p.Spec.ExternalLocal {
			return slices.ContainsFunc(pool, func(ep *tracker.Endpoint) bool { return ep.Ready })
		} else {
			return len(pool) != 0
		}
	}
	return false
}

// addresses yields the external and load-balancer IPs at which a port has frontends.
func addresses(p *ruleset.Port) func(func(netip.Addr) bool) {
	return func(yield func(netip.Addr) bool) {
		if p == nil {
			return
		}
		for i := range p.Frontends {
			if fe := &p.Frontends[i]; (fe.Kind == ruleset.KindExternalIP || fe.Kind == ruleset.KindLoadBalancerIP) && !yield(fe.Addr) {
				return
			}
		}
	}
}
