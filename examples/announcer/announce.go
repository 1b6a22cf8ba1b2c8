package main

import (
	"cmp"
	"context"
	"maps"
	"net/netip"
	"slices"

	"k8s.io/apimachinery/pkg/types"

	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/tracker"
)

// address is a load-balancer IP, or an external IP in the ranges given to [newFollower]. One of the Services that ask
// for it owns it: one that has it as load-balancer IP before one that has it as external IP, then the one that was
// created first, then the one with the lowest [tracker.Key]. Services of other namespaces do not affect the address.
type address struct {
	// Addr is the address.
	Addr netip.Addr
	// Serves reports whether the node should get the packets to Addr: the owner and all other Services
	// serve there. If one of them does not, its packets are better off at another node.
	Serves bool
	// Services are the Services of the owner's namespace that have frontends at the address. It is
	// empty if no Service has the address any more. The value reports whether the node serves a port of the
	// Service at the address:
	//
	//   - With externalTrafficPolicy Local, the node has a ready endpoint. One that terminates still
	//     gets the packets that arrive, but the node should get no more of them, as its
	//     health-check node port says, too.
	//   - With policy Cluster, the Service has an endpoint that gets packets. If all endpoints
	//     terminate, no node would be better.
	//
	// A port that is refused or dropped is not served.
	Services map[types.NamespacedName]bool
}

// follower is a [ruleset.Backend] that holds the addresses. [newFollower] makes one.
type follower struct {
	changed     func(address)
	externalIPs []netip.Prefix

	// ports holds the ports that ask for each address.
	ports map[netip.Addr]map[tracker.Key]*ruleset.Port
	// told is what changed was last called with.
	told map[netip.Addr]address
}

// newFollower returns a follower of load-balancer IPs, and of external IPs in the ranges externalIPs. A user who may edit
// Services can write any external IP, so the operator chooses the ranges. changed is called with each address whose Services or their
// Serves have changed, in the order of the addresses, from the goroutine of Apply. It must not call the cursor. It
// is not called for other changes of a Service.
func newFollower(changed func(address), externalIPs []netip.Prefix) *follower {
	return &follower{
		changed: changed, externalIPs: externalIPs,
		ports: map[netip.Addr]map[tracker.Key]*ruleset.Port{}, told: map[netip.Addr]address{},
	}
}

// Apply implements [ruleset.Backend]. It never fails. Its cost grows with the changed
// ports and all ports at their addresses.
func (f *follower) Apply(_ context.Context, d *ruleset.Delta) error {
	touched := map[netip.Addr]bool{}
	if d.Full {
		for a := range f.ports {
			touched[a] = true
		}
		clear(f.ports)
	}
	for i := range d.Changes {
		c := &d.Changes[i]
		for _, a := range addresses(c.Old) {
			touched[a] = true
			delete(f.ports[a], c.Key)
		}
		for _, a := range addresses(c.New) {
			touched[a] = true
			if f.ports[a] == nil {
				f.ports[a] = map[tracker.Key]*ruleset.Port{}
			}
			f.ports[a][c.Key] = c.New
		}
	}
	for _, addr := range slices.SortedFunc(maps.Keys(touched), netip.Addr.Compare) {
		was, now := f.told[addr], f.at(addr)
		if f.told[addr] = now; len(now.Services) == 0 {
			delete(f.told, addr)
		}
		if len(f.ports[addr]) == 0 {
			delete(f.ports, addr)
		}
		if was.Serves != now.Serves || !maps.Equal(was.Services, now.Services) {
			f.changed(now)
		}
	}
	return nil
}

func (f *follower) at(addr netip.Addr) address {
	out := address{Addr: addr, Services: map[types.NamespacedName]bool{}}
	var owner *ruleset.Port
	for _, p := range f.ports[addr] {
		if owner == nil || compare(p, owner, addr) < 0 {
			owner = p
		}
	}
	if owner == nil || external(owner, addr) && !slices.ContainsFunc(f.externalIPs, func(r netip.Prefix) bool { return r.Contains(addr) }) {
		return out
	}
	for key, p := range f.ports[addr] {
		if fe := frontend(p, addr); fe != nil && key.Namespace == owner.Key.Namespace {
			out.Services[key.NamespacedName] = out.Services[key.NamespacedName] || serves(p, fe)
		}
	}
	_, out.Serves = out.Services[owner.Key.NamespacedName]
	for _, serves := range out.Services {
		out.Serves = out.Serves && serves
	}
	return out
}

// compare compares two ports that ask for an address. The owner's is the lowest.
func compare(p, q *ruleset.Port, addr netip.Addr) int {
	if e := external(p, addr); e != external(q, addr) {
		if e {
			return 1
		}
		return -1
	}
	return cmp.Or(p.Spec.CompareAge(q.Spec), p.Key.Compare(q.Key))
}

// external reports whether addr, for which p asks, is no load-balancer IP of p.
func external(p *ruleset.Port, addr netip.Addr) bool {
	return !slices.Contains(p.Spec.LoadBalancerIPs, addr)
}

// frontend returns the frontend of p at an external or load-balancer IP, or nil.
func frontend(p *ruleset.Port, addr netip.Addr) *ruleset.Frontend {
	for i := range p.Frontends {
		if fe := &p.Frontends[i]; fe.Addr == addr && fe.Kind != ruleset.KindClusterIP {
			return fe
		}
	}
	return nil
}

func serves(p *ruleset.Port, fe *ruleset.Frontend) bool {
	pool := p.Pool(fe.Target)
	if !p.Spec.ExternalLocal {
		return len(pool) != 0
	}
	return slices.ContainsFunc(pool, func(ep *tracker.Endpoint) bool { return ep.Ready })
}

// addresses returns the external and load-balancer IPs for which a port asks. One whose frontend there exceeds
// the budget still owns the address.
func addresses(p *ruleset.Port) []netip.Addr {
	if p == nil {
		return nil
	}
	return slices.Concat(p.Spec.ExternalIPs, p.Spec.LoadBalancerIPs)
}
