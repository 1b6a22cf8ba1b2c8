//go:build linux

package iptables

import (
	"context"
	"errors"
	"strings"

	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/tracker"
)

// bisect returns the changes that are refused, with their errors. It tries halves of the
// list in a chain that nothing leads to. It fails if a try has another error than a
// refusal.
func (f *family) bisect(ctx context.Context, m *model, changes []ruleset.Change) (map[tracker.Key]error, error) {
	bad := map[tracker.Key]error{}
	var search func(list []ruleset.Change) error
	search = func(list []ruleset.Change) error {
		err := f.tryChanges(ctx, m, list)
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
	for _, part := range parts(changes, f.limit, func(c ruleset.Change) int { return size(c.New) }) {
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
		r, err := m.render(c.New)
		if err != nil {
			return err
		}
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
		_, err := f.write(ctx, []*input{newInput(t, []chain{probe[t]}, nil, nil, nil, nil)})
		probe[t].rules = nil
		return err
	}
	for _, c := range chains {
		if len(probe[c.table].rules)+len(c.rules) > f.limit {
			if err := flush(c.table); err != nil {
				return err
			}
		}
		for _, r := range c.rules {
			if to := target([]byte(r)); strings.HasPrefix(to, "KUBE-") {
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
		if _, err := f.write(ctx, []*input{newInput(t, nil, nil, gone, gone, nil)}); err != nil {
			return err
		}
	}
	return nil
}
