package winkernel

import (
	"context"
	"fmt"
)

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
	b := &Backend{config: c}
	b.adopt(s)
	if err := (&apply{Backend: b, ctx: ctx}).sweep(); err != nil {
		return fmt.Errorf("winkernel: %w", err)
	}
	return nil
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
