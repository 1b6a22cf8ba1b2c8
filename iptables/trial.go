//go:build linux

package iptables

import (
	"context"
	"errors"
	"fmt"
	"strings"

	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/tracker"
)

// blame finds out which of the changes are refused, by trying each, or many
// together, in a chain that nothing leads to. Its error says that there was no
// finding out.
func (f *family) blame(ctx context.Context, m *model, changes []ruleset.Change) (map[tracker.Key]error, error) {
	bad := map[tracker.Key]error{}
	var search func(list []ruleset.Change) error
	search = func(list []ruleset.Change) error {
		err := f.try(ctx, m, list)
		switch {
		case err == nil:
			return nil
		case !refused(err) && !tooLarge(err):
			return err
		case len(list) == 1:
			bad[list[0].Key] = err
			return nil
		}
		half := len(list) / 2
		if err := search(list[:half]); err != nil {
			return err
		}
		return search(list[half:])
	}
	for _, part := range parts(changes, f.limit) {
		if err := search(part); err != nil {
			return nil, err
		}
	}
	return bad, f.dropTrial(ctx)
}

// parts divides changes into parts of about limit lines.
func parts(changes []ruleset.Change, limit int) [][]ruleset.Change {
	var out [][]ruleset.Change
	start, lines := 0, 0
	for i, c := range changes {
		lines += size(c.New)
		if lines > limit && i > start {
			out = append(out, changes[start:i])
			start, lines = i, size(c.New)
		}
	}
	if start < len(changes) {
		out = append(out, changes[start:])
	}
	return out
}

// try has the kernel take all rules of the changed Services into a chain that
// nothing leads to.
func (f *family) try(ctx context.Context, m *model, changes []ruleset.Change) error {
	var chains []chain
	for _, c := range changes {
		r, err := m.render(c.New)
		if err != nil {
			return err
		}
		chains = append(chains, r.chains...)
		for _, p := range r.rules {
			rules := []string{p.rule}
			if p.before != "" {
				rules = append(rules, p.before)
			}
			chains = append(chains, chain{table: dispatchers[p.dispatcher].table, rules: rules})
		}
	}
	return f.tryRules(ctx, chains)
}

// tryRules has the kernel take the rules of chains into one that nothing leads to:
// many at once, but none of them in parts. Chains that they lead to need not be
// there.
func (f *family) tryRules(ctx context.Context, chains []chain) error {
	trial := [tables]chain{{table: filter, name: chainTrial}, {table: nat, name: chainTrial}}
	flush := func(t table) error {
		if len(trial[t].rules) == 0 {
			return nil
		}
		_, err := f.write(ctx, []*input{newInput(t, []chain{trial[t]}, nil, nil, nil, nil)})
		trial[t].rules = nil
		return err
	}
	for _, c := range chains {
		if len(trial[c.table].rules)+len(c.rules) > f.limit {
			if err := flush(c.table); err != nil {
				return err
			}
		}
		for _, r := range c.rules {
			if to := target([]byte(r)); strings.HasPrefix(to, "KUBE-") {
				r = r[:strings.LastIndex(r, to)-len("-j ")] + "-j RETURN"
			}
			trial[c.table].rules = append(trial[c.table].rules, r)
		}
	}
	return errors.Join(flush(filter), flush(nat))
}

// dropTrial deletes the chain that rules are tried in.
func (f *family) dropTrial(ctx context.Context) error {
	for t := range tables {
		gone := []string{chainTrial}
		if _, err := f.write(ctx, []*input{newInput(t, nil, nil, gone, gone, nil)}); err != nil {
			return err
		}
	}
	return nil
}

// probe tries whether the programs and the kernel know what every Service needs, and
// finds out what has to be done without. That there are objects to count into does not
// mean that rules can match them, which takes xt_nfacct in the kernel and its
// counterpart in iptables.
func (f *family) probe(ctx context.Context) error {
	var count counters
	if f.accounts != nil {
		count = counters{invalid: true, localhost: f.localhost}
	}
	var err, uncounted error
	for _, a := range []struct {
		count       counters
		randomFully bool
	}{{count, true}, {counters{}, true}, {count, false}, {counters{}, false}} {
		f.counters, f.randomFully = a.count, a.randomFully
		if err = f.tryNeeded(ctx); !refused(err) {
			break
		}
		if uncounted == nil {
			uncounted = err
		}
	}
	f.can = f.counters
	if refused(err) {
		err = fmt.Errorf("%w: %w", ErrUnsupported, err)
	} else if err == nil && f.can != count {
		f.notCounted(uncounted)
	}
	return errors.Join(err, f.dropTrial(ctx))
}

// tryNeeded tries the rules that there are whatever the Services, and what else is
// needed for these.
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
