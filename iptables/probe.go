//go:build linux

package iptables

import (
	"context"

	"github.com/go-proxier/proxier/ruleset"
)

// probe tries the rules that every Service needs, and selects the counters that the
// programs and the kernel support. Even if the objects exist, rules can count into them only
// if the kernel has xt_nfacct and iptables its counterpart.
func (f *family) probe(ctx context.Context) error {
	var count counters
	if f.accounts != nil {
		count = counters{invalid: true, localhost: f.localhost}
	}
	f.counters = count
	err := f.tryNeeded(ctx)
	if refused(err) && count != (counters{}) {
		uncounted := err
		f.counters = counters{}
		if err = f.tryNeeded(ctx); err == nil {
			f.notCounted(uncounted)
		}
	}
	f.can = f.counters
	if refused(err) {
		err = &ruleset.UnsupportedError{Backend: "iptables", Family: f.family, Feature: "a rule that every Service needs", Err: err}
	}
	dropped := f.dropProbe(ctx)
	if err == nil {
		err = dropped
	}
	return err
}

// tryNeeded tries the rules that do not depend on Services, and one of each other kind
// that Services need.
func (f *family) tryNeeded(ctx context.Context) error {
	m, err := newModel(f.settings, &ruleset.Node{NodePorts4: ruleset.NodePorts{All: true}, NodePorts6: ruleset.NodePorts{All: true}})
	if err != nil {
		return err
	}
	chains := []chain{{table: nat, rules: []string{probability(1, 2) + " -j RETURN"}}}
	if f.counters.localhost {
		chains = append(chains, chain{table: nat, rules: []string{counted(LocalhostNodePorts) + " -j RETURN"}})
	}
	m.allChains(func(c chain) { chains = append(chains, c) })
	return f.tryRules(ctx, chains)
}
