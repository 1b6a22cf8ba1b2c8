//go:build linux

package iptables

import (
	"context"
	"fmt"
	"math/rand/v2"
	"strings"
)

// canaryRule makes the rules of a canary. Each has a fresh random value, so that a table
// that was restored to an earlier state does not look up to date.
type canaryRule struct{ last string }

func (c *canaryRule) next() string {
	c.last = comment(fmt.Sprintf("%s%016x", canaryText, rand.Uint64()))
	return c.last
}

const canaryText = "kubernetes service rules as of change "

// isCanary reports whether a rule is one that a Backend puts into its canary.
func isCanary(rule string) bool {
	return strings.HasPrefix(rule, strings.TrimSuffix(comment(canaryText), `"`))
}

// adoptCanaries makes sure that every table has a canary, and stores its rule.
func (r *replacement) adoptCanaries(ctx context.Context) error {
	for t := range tables {
		if r.touched[t] {
			continue
		}
		if c := r.kernel[t].canary; len(c) == 1 && isCanary(c[0]) {
			r.canary[t] = c[0]
			continue
		}
		var canary canaryRule
		if _, err := r.write(ctx, []*input{newInput(t, nil, nil, nil, nil, canary.next)}); err != nil {
			return err
		}
		r.canary[t] = canary.last
	}
	return nil
}
