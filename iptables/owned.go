//go:build linux

package iptables

import (
	"context"
	"fmt"
	"hash/maphash"
	"strings"

	"golang.org/x/sys/unix"
)

// Owned reports whether a [Backend] has written what is in the tables, in any
// family of the configuration. Where it has not, chains of the same names are
// kube-proxy's, which [Cleanup] would remove, too. It fails if that cannot be told.
func Owned(ctx context.Context, c Config) (bool, error) {
	c, err := c.withDefaults()
	if err != nil {
		return false, err
	}
	netns := -1
	if c.NetNS != 0 {
		if netns, err = unix.FcntlInt(uintptr(c.NetNS), unix.F_DUPFD_CLOEXEC, 3); err != nil {
			return false, fmt.Errorf("iptables: network namespace: %w", err)
		}
		defer unix.Close(netns)
	}
	for _, fam := range c.Families {
		t, err := newTool(ctx, c, fam, netns)
		if err != nil {
			return false, err
		}
		// Every table has a canary, this one costs the least to read.
		k, err := t.readKernel(ctx, filter, maphash.MakeSeed())
		if err != nil {
			return false, err
		}
		for _, rule := range k.canary {
			if isCanary(rule) {
				return true, nil
			}
		}
	}
	return false, nil
}

// isCanary reports whether a rule is one that a Backend puts into its canary.
func isCanary(rule string) bool {
	return strings.HasPrefix(rule, strings.TrimSuffix(comment(canaryText), `"`))
}
