//go:build linux

package iptables

import (
	"context"
	"fmt"
	"hash/maphash"
	"strings"

	"github.com/go-proxier/proxier/internal/netns"
)

// Owned reports whether a [Backend] has written what is in the tables, in any
// family of the configuration. Where it has not, chains of the same names are
// kube-proxy's, which [Cleanup] would remove, too. It fails if that cannot be told.
func Owned(ctx context.Context, c Config) (bool, error) {
	c, err := c.withDefaults()
	if err != nil {
		return false, err
	}
	ns, err := netns.Open(c.NetNS)
	if err != nil {
		return false, fmt.Errorf("iptables: %w", err)
	}
	defer ns.Close()
	for _, fam := range c.Families {
		t, err := findTool(ctx, c, fam, ns)
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
