package winkernel

import (
	"context"
	"errors"
	"fmt"
)

// Owned reports whether the service has objects that Cleanup would delete.
func Owned(ctx context.Context, c Config) (bool, error) {
	c, s, err := c.inspect(ctx)
	if err != nil {
		return false, err
	}
	p, found := planner{&c, &s.network}, len(s.lbs) != 0 || len(s.broken) != 0
	for _, e := range s.endpoints {
		found = found || p.owns(&e)
	}
	return found, nil
}

// Cleanup deletes the objects of a service proxy: all load balancers, except those with an endpoint
// in a network other than c.Network, and the remote endpoints that a Backend or kube-proxy makes
// for pods of other nodes and for cluster IPs. Load balancers have no names and no owner, so
// Cleanup cannot distinguish a Backend's from kube-proxy's. It leaves the endpoint of the source
// VIP, which the network plugin may have made, and the plugin's endpoints. It continues after
// an error.
func Cleanup(ctx context.Context, c Config) error {
	c, s, err := c.inspect(ctx)
	if err != nil {
		return err
	}
	var errs []error
	remove := func(what, id string, remove func(id string) error) {
		err := ctx.Err()
		if err == nil {
			err = remove(id)
		}
		if err != nil && !errors.Is(err, ErrNotFound) {
			errs = append(errs, fmt.Errorf("winkernel: cannot delete %s: %w", what, err))
		}
	}
	for f, lb := range s.lbs {
		remove("load balancer "+f.String(), lb.ID, c.HNS.DeleteLoadBalancer)
	}
	for _, id := range s.broken {
		remove("load balancer "+id, id, c.HNS.DeleteLoadBalancer)
	}
	p := planner{&c, &s.network}
	for id, e := range s.endpoints {
		if p.owns(&e) {
			remove(fmt.Sprintf("endpoint %v", e.Addrs[0]), id, c.HNS.DeleteEndpoint)
		}
	}
	return errors.Join(errs...)
}

// inspect returns the completed configuration and the state of the service.
func (c Config) inspect(ctx context.Context) (Config, *state, error) {
	c, err := c.withDefaults()
	if err == nil {
		err = ctx.Err()
	}
	if err != nil {
		return c, nil, err
	}
	s, err := c.read()
	return c, s, err
}
