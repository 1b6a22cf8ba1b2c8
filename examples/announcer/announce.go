package main

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

// address is an external or load-balancer IP that Services have.
type address struct {
	// Addr is the address.
	Addr netip.Addr
	// Serves reports whether the node should get the packets to Addr: each of the Services
	// serves there. If one of them does not, its packets are better off at another node.
	Serves bool
	// Services are the Services that have the address, by name. They are none if the last one
	// has lost it.
	Services []server
}

// server is a Service at an address.
type server struct {
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
	// A port that is refused or dropped is not served.
	Serves bool
}

// follower is a [ruleset.Backend] that holds the addresses. [newFollower] makes one. Its methods may be called
// concurrently.
type follower struct {
	changed func(address)

	mu sync.Mutex
	// ports holds the ports of each address.
	ports map[netip.Addr]map[tracker.Key]*ruleset.Port
	// told is what changed was last called with.
	told map[netip.Addr]address
}

// newFollower returns a follower. changed is called with each address whose Services or their
// Serves have changed, in the order of the addresses, from the goroutine of Apply. It must not call the cursor. It
// is not called for other changes of a Service.
func newFollower(changed func(address)) *follower {
	return &follower{changed: changed, ports: map[netip.Addr]map[tracker.Key]*ruleset.Port{}, told: map[netip.Addr]address{}}
}

// Apply implements [ruleset.Backend]. It never fails. The cost is that of the changed ports and of all ports at
// their addresses.
func (f *follower) Apply(_ context.Context, d *ruleset.Delta) error {
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
	var news []address
	for _, addr := range slices.SortedFunc(maps.Keys(touched), netip.Addr.Compare) {
		was, now := f.told[addr], f.at(addr)
		if len(now.Services) == 0 {
			delete(f.ports, addr)
			delete(f.told, addr)
		} else {
			f.told[addr] = now
		}
		if !slices.EqualFunc(was.Services, now.Services, func(a, b server) bool { return a.Name == b.Name && a.Serves == b.Serves }) {
			news = append(news, now)
		}
	}
	f.mu.Unlock()
	for _, a := range news {
		f.changed(a)
	}
	return nil
}

// at returns the state of an address.
func (f *follower) at(addr netip.Addr) address {
	out := address{Addr: addr}
	for _, key := range slices.SortedFunc(maps.Keys(f.ports[addr]), tracker.Key.Compare) {
		if n := len(out.Services); n == 0 || out.Services[n-1].Name != key.NamespacedName {
			out.Services = append(out.Services, server{Name: key.NamespacedName})
		}
		s := &out.Services[len(out.Services)-1]
		s.Serves = s.Serves || serves(f.ports[addr][key], addr)
	}
	out.Serves = len(out.Services) != 0 && !slices.ContainsFunc(out.Services, func(s server) bool { return !s.Serves })
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
