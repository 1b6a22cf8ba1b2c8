package iptables

import (
	"context"
	"errors"
	"strings"

	"github.com/go-proxier/proxier/internal/iptext"
	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/tracker"
)

// bisect returns the changes that are refused, with their errors. It writes halves of the
// list to a chain that no rule refers to. It fails if a try is neither done nor rejected.
func (f *family) bisect(ctx context.Context, m *model, changes []ruleset.Change) (map[tracker.Key]error, error) {
	bad := map[tracker.Key]error{}
	var search func(list []ruleset.Change) error
	search = func(list []ruleset.Change) error {
		err := f.tryChanges(ctx, m, list)
		switch out := outcomeOf(err); {
		case !out.rejected():
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
	for _, part := range parts(changes, nil, f.limit, func(c ruleset.Change) int { return size(c.New) }) {
		if err := search(part); err != nil {
			return nil, err
		}
	}
	return bad, f.dropProbe(ctx)
}

// tryChanges tries all rules of the changed Services.
func (f *family) tryChanges(ctx context.Context, m *model, changes []ruleset.Change) error {
	var chains []chain
	for _, c := range changes {
		r := m.render(c.New)
		chains = append(chains, r.chains...)
		for _, p := range r.rules {
			chains = append(chains, chain{table: dispatchers[p.dispatcher].table, rules: p.appendTo(nil)})
		}
	}
	return f.tryRules(ctx, chains)
}

// tryRules writes the rules of chains into one that nothing leads to. The rules of one
// chain are never divided. Chains that the rules lead to need not exist.
func (f *family) tryRules(ctx context.Context, chains []chain) error {
	probe := [tables]chain{{table: filter, name: chainProbe}, {table: nat, name: chainProbe}}
	flush := func(t table) error {
		if len(probe[t].rules) == 0 {
			return nil
		}
		out := f.write(ctx, newInput(t, []chain{probe[t]}, nil, nil, nil, nil))
		probe[t].rules = nil
		return out.err
	}
	for _, c := range chains {
		if len(probe[c.table].rules)+len(c.rules) > f.limit {
			if err := flush(c.table); err != nil {
				return err
			}
		}
		for _, r := range c.rules {
			if to := iptext.Target(r); strings.HasPrefix(to, "KUBE-") {
				r = r[:strings.LastIndex(r, to)-len("-j ")] + "-j RETURN"
			}
			probe[c.table].rules = append(probe[c.table].rules, r)
		}
	}
	return errors.Join(flush(filter), flush(nat))
}

// dropProbe deletes the chain in which rules are tried.
func (f *family) dropProbe(ctx context.Context) error {
	for t := range tables {
		gone := []string{chainProbe}
		if out := f.write(ctx, newInput(t, nil, nil, gone, gone, nil)); out.err != nil {
			return out.err
		}
	}
	return nil
}
