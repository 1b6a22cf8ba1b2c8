//go:build linux

package iptables

import (
	"cmp"
	"context"
	"slices"

	"github.com/go-proxier/proxier/ruleset"
)

// probe tries the rules that every Service needs, and selects the counters that the
// programs and the kernel support. Even if the objects exist, rules can count into them only
// if the kernel has xt_nfacct and iptables its counterpart.
func (f *family) probe(ctx context.Context) error {
	if f.accounts != nil {
		f.counters = countersFor(f.localhost)
	}
	err := f.tryNeeded(ctx)
	if refused(err) && f.counters != nil {
		uncounted := err
		f.counters = nil
		if err = f.tryNeeded(ctx); err == nil {
			f.notCounted(uncounted)
		}
	}
	f.can = f.counters
	if refused(err) {
		err = &ruleset.UnsupportedError{Backend: "iptables", Family: f.family, Feature: "a rule that every Service needs", Err: err}
	}
	return cmp.Or(err, f.dropProbe(ctx))
}

// tryNeeded tries the rules that do not depend on Services, and one of each other kind
// that Services need.
func (f *family) tryNeeded(ctx context.Context) error {
	m, err := newModel(f.settings, &ruleset.Node{NodePorts4: ruleset.NodePorts{All: true}, NodePorts6: ruleset.NodePorts{All: true}})
	if err != nil {
		return err
	}
	chains := []chain{{table: nat, rules: []string{probability(1, 2) + " -j RETURN"}}}
	if slices.Contains(f.counters, LocalhostNodePorts) {
		chains = append(chains, chain{table: nat, rules: []string{counted(LocalhostNodePorts) + " -j RETURN"}})
	}
	m.allChains(func(c chain) { chains = append(chains, c) })
	return f.tryRules(ctx, chains)
}
