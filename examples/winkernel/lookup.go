package winkernel

import (
	"context"
	"net/netip"
	"slices"

	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/tracker"
)

// Lookup returns what the service does with the first packet of a connection. It needs no
// Backend and writes nothing. Load balancers do not have the names of Services, so
// [ruleset.Found].Service is "". The error wraps [ruleset.ErrNoRules] if there is no load
// balancer. Lookup lists all of them.
func Lookup(ctx context.Context, c Config, q ruleset.Query) (ruleset.Found, error) {
	_, s, err := c.inspect(ctx)
	switch {
	case err != nil:
		return ruleset.Found{}, err
	case len(s.lbs) == 0:
		return ruleset.Found{}, ruleset.ErrNoRules
	}
	to := q.Packet.To
	f := Frontend{VIP: to.Addr(), Port: to.Port(), Protocol: q.Packet.Protocol, Family: tracker.FamilyOf(to.Addr())}
	if q.NodePort {
		f.VIP = netip.Addr{}
	}
	lb, ok := s.lbs[f]
	if !ok {
		return ruleset.Found{}, nil
	}
	out := ruleset.Found{Entry: true, Where: "load balancer " + lb.ID}
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
