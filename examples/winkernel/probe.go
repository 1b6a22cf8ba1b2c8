package winkernel

import (
	"context"
	"errors"
	"fmt"

	"github.com/go-proxier/proxier/ruleset/dataplane"
	"github.com/go-proxier/proxier/tracker"
)

// Probe reports whether the service can do what the configuration asks for. Errors about the
// configuration wrap [ruleset.ErrConfig]. A missing feature is a *[dataplane.UnsupportedError].
// If the network does not exist yet, the error wraps [ErrNotFound], and if the service does not
// run, [ErrNotRunning]; both may change. Probe writes nothing.
func Probe(ctx context.Context, c Config) error {
	c, err := c.withDefaults()
	if err != nil {
		return err
	}
	return c.probe(ctx)
}

func (c *Config) probe(ctx context.Context) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	n, err := c.HNS.Network(c.Network)
	if err != nil {
		return fmt.Errorf("winkernel: cannot read network %q: %w", c.Network, err)
	}
	if err := c.forNetwork(&n); err != nil {
		return err
	}
	for _, need := range []struct {
		feature Feature
		family  tracker.Family
		needed  bool
		minimum string
	}{
		{RemoteSubnets, 0, n.Type == Overlay, "HNS 9.2"},
		{DSR, 0, c.DSR, "HNS 9.3"},
		{DualStack, tracker.IPv6, c.serves(tracker.IPv6), "HNS 11.10"},
	} {
		if !need.needed {
			continue
		}
		switch err := c.HNS.Supports(need.feature); {
		case errors.Is(err, ErrNotImplemented):
			return &dataplane.UnsupportedError{Backend: "winkernel", Family: need.family, Feature: string(need.feature), Minimum: need.minimum, Err: err}
		case err != nil:
			return fmt.Errorf("winkernel: cannot read what the service supports: %w", err)
		}
	}
	return nil
}

// serves reports whether the node has an address of a family.
func (c *Config) serves(f tracker.Family) bool {
	_, ok := c.nodeIP(f)
	return ok
}
