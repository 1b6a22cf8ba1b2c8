package winkernel

import (
	"context"
	"fmt"
	"net/netip"
	"slices"

	"github.com/go-proxier/proxier/ruleset/dataplane"
	"github.com/go-proxier/proxier/tracker"
)

// Cleanup deletes the objects of a service proxy: all load balancers, except those with an endpoint
// in a network other than c.Network, and the remote endpoints that a Backend or kube-proxy makes
// for pods of other nodes and for cluster IPs. Load balancers have no names and no owner, so
// Cleanup cannot distinguish a Backend's from kube-proxy's. It leaves the endpoint of the source
// VIP, which the network plugin may have made, and the plugin's endpoints. It continues after
// an error.
func Cleanup(ctx context.Context, c Config) error {
	s, err := c.inspect(ctx)
	if err != nil {
		return err
	}
	if err := (&apply{state: s, backend: &Backend{}, ctx: ctx}).sweep(); err != nil {
		return fmt.Errorf("winkernel: %w", err)
	}
	return nil
}

// inspect returns the state of the service.
func (c Config) inspect(ctx context.Context) (*state, error) {
	c, err := c.withDefaults(ctx)
	if err != nil {
		return nil, err
	}
	return c.read()
}

// Lookup returns the service's treatment of a connection's first packet. It needs no Backend
// and writes nothing. Load balancers do not have the names of Services, so
// [dataplane.Found].Service is "". The error wraps [dataplane.ErrNoRules] if there is no load
// balancer. Lookup lists all of them.
func Lookup(ctx context.Context, c Config, q dataplane.Query) (dataplane.Found, error) {
	s, err := c.inspect(ctx)
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
