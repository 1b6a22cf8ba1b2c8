//go:build linux

package iptables

import (
	"context"
	"hash/maphash"
	"slices"
)

// Owned reports whether a [Backend] has programmed the tables, in any family of the
// configuration. If not, chains of the same names are kube-proxy's, which [Cleanup] would
// remove, too. The error is a [*ruleset.UnsupportedError] if a program is missing.
func Owned(ctx context.Context, c Config) (bool, error) {
	c, ns, err := c.open()
	if err != nil {
		return false, err
	}
	defer ns.Close()
	for _, fam := range c.Families {
		t, err := findTool(ctx, c, fam, ns)
		if err != nil {
			return false, err
		}
		// Every table has a canary, and filter is the smaller one.
		k, err := t.readKernel(ctx, filter, maphash.MakeSeed())
		if err != nil {
			return false, err
		}
		if slices.ContainsFunc(k.canary, isCanary) {
			return true, nil
		}
	}
	return false, nil
}
