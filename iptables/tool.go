//go:build linux

package iptables

import (
	"context"
	"errors"
	"fmt"

	"github.com/go-proxier/proxier/internal/iptool"
	"github.com/go-proxier/proxier/internal/netns"
	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/tracker"
)

// tool runs the programs of one family, in one network namespace.
type tool struct{ *iptool.Tool }

// findTool finds the programs of a family and asks them for their version.
func findTool(ctx context.Context, c Config, f tracker.Family, ns *netns.Namespace) (tool, error) {
	names := c.Tools4
	if f == tracker.IPv6 {
		names = c.Tools6
	}
	t, err := iptool.Find(ctx, iptool.Config{
		Family: f, Flavour: string(c.Flavour), Restore: names.Restore, Save: names.Save, Namespace: ns,
		LockFile: c.LockFile, LockWait: c.LockWait, Timeout: c.Timeout,
	})
	if errors.Is(err, iptool.ErrUnsupported) {
		return tool{}, &ruleset.UnsupportedError{Backend: "iptables", Family: f, Feature: "running iptables-restore and iptables-save", Minimum: "iptables 1.6.2", Err: err}
	}
	return tool{t}, err
}

// open returns c with defaults for everything that is not set, and its network namespace,
// which the caller must close.
func (c Config) open() (Config, *netns.Namespace, error) {
	c, err := c.withDefaults()
	if err != nil {
		return c, nil, err
	}
	ns, err := netns.Open(c.NetNS)
	if err != nil {
		return c, nil, fmt.Errorf("iptables: %w", err)
	}
	return c, ns, nil
}

// apply applies an input.
func (t tool) apply(ctx context.Context, in *input) error {
	return t.Restore(ctx, in.text.Bytes())
}
