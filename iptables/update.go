package iptables

import (
	"context"
	"errors"
	"log/slog"
	"slices"

	"github.com/go-proxier/proxier/internal/backendconf"
	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/tracker"
)

// update applies changes to tables that agree with the model. It returns the Services that
// were refused.
func (f *family) update(ctx context.Context, node *ruleset.Node, changes []ruleset.Change) (map[tracker.Key]error, error) {
	hidden := func(c ruleset.Change) bool { return len(c.Attempted) != 0 } // a caller hid that a delta is in effect
	if !sameRules(f.model.node, node) || slices.ContainsFunc(changes, hidden) {
		return nil, ruleset.ErrNeedFull
	}
	if slices.Contains(f.counters, LocalhostNodePorts) && f.model.trees[toNodePorts].ahead == 0 {
		// Another program can delete an object that no rule counts into.
		if err := makeCounters(f.accounts, f.counters); err != nil {
			return nil, f.discard(err)
		}
	}
	bad := map[tracker.Key]error{}
	f.refuse(bad, f.unfit(changes))
	trusted := func(c ruleset.Change) bool { return f.suspects[c.Key] == nil || bad[c.Key] != nil }
	if suspects := slices.DeleteFunc(slices.Clone(changes), trusted); len(suspects) != 0 {
		refused, err := f.bisect(ctx, f.model, suspects)
		if err != nil {
			return nil, f.discard(err)
		}
		f.refuse(bad, refused)
	}
	changes = slices.Clone(changes)
	all := parts(changes, joinTakeovers(changes), f.limit, changeSize)
	if len(all) == 0 {
		all = [][]ruleset.Change{nil} // the node may have changed
	}
	for _, part := range all {
		if err := f.updateSome(ctx, node, part, bad); err != nil {
			return nil, err
		}
	}
	return bad, nil
}

// joinTakeovers moves the changes of Services that take frontends from each other together.
// joined[i] reports that change i must be written with the one before it, so that a frontend
// moves in one step. joined is nil if no frontend moves.
func joinTakeovers(changes []ruleset.Change) (joined []bool) {
	var at map[tracker.Key]int
	var last []int // of each change a later one of its group; the last one leads to itself
	find := func(i int) int {
		for last[i] != i {
			i = last[i]
		}
		return i
	}
	for i, c := range changes {
		for _, from := range c.TakenFrontends() {
			if at == nil {
				at, last = make(map[tracker.Key]int, len(changes)), make([]int, len(changes))
				for j, c := range changes {
					at[c.Key], last[j] = j, j
				}
			}
			if j, ok := at[from]; ok {
				a, b := find(i), find(j)
				last[min(a, b)] = max(a, b)
			}
		}
	}
	if at == nil {
		return nil
	}
	slices.SortStableFunc(changes, func(a, b ruleset.Change) int { return find(at[a.Key]) - find(at[b.Key]) })
	joined = make([]bool, len(changes))
	for i := 1; i < len(changes); i++ {
		joined[i] = find(at[changes[i].Key]) == find(at[changes[i-1].Key])
	}
	return joined
}

// parts divides changes into parts of about limit lines, but not before a joined one.
func parts(changes []ruleset.Change, joined []bool, limit int, size func(ruleset.Change) int) [][]ruleset.Change {
	var out [][]ruleset.Change
	start, lines := 0, 0
	for i, c := range changes {
		n := size(c)
		if lines += n; lines > limit && i > start && (joined == nil || !joined[i]) {
			out = append(out, changes[start:i])
			start, lines = i, n
		}
	}
	if start < len(changes) {
		out = append(out, changes[start:])
	}
	return out
}

// changeSize returns about how many lines a change takes. The chains that lead to a
// Service are written only if its frontends or their targets differ.
func changeSize(c ruleset.Change) int {
	if c.Old != nil && c.New != nil && slices.EqualFunc(c.Old.Frontends, c.New.Frontends, func(a, b ruleset.Frontend) bool {
		return a.Kind == b.Kind && a.Addr == b.Addr && a.Port == b.Port && a.Target == b.Target && a.Internal == b.Internal
	}) {
		return 3*len(c.New.Selection.Reachable) + len(c.Old.Selection.Reachable) + leafRules
	}
	return size(c.New) + size(c.Old)
}

// size returns about how many lines a Service takes.
func size(s *ruleset.Port) int {
	if s == nil {
		return 0
	}
	return 3*len(s.Selection.Reachable) + 4*len(s.Frontends) + 2*leafRules
}

// updateSome writes some changes together. If they are rejected, it finds the Services at fault,
// adds them to bad, and writes the others.
func (f *family) updateSome(ctx context.Context, node *ruleset.Node, changes []ruleset.Change, bad map[tracker.Key]error) error {
	for {
		good, left := split(changes, bad)
		part := slices.Concat(good, left)
		tx := f.Renderer.update(node, part)
		out := f.writeBatch(ctx, tx.batch, [tables][]string{})
		if out.result == done {
			f.dropKept(part)
			return nil
		}
		tx.Revert()
		switch {
		case out.result == unsure, restored(out.err):
			return f.discard(out.err)
		case f.shrink(out):
			continue
		case !out.rejected():
			return out.err
		}
		refused, err := f.bisect(ctx, f.model, good)
		if err != nil || len(refused) == 0 { // another program changed our chains
			return f.discard(errors.Join(out.err, err))
		}
		f.refuse(bad, refused)
	}
}

// refuse adds Services to bad and logs them.
func (f *family) refuse(bad, refused map[tracker.Key]error) {
	for k, err := range refused {
		bad[k] = unwritten{err}
		backendconf.Complain(f.complaints, slog.LevelError, k, "iptables: service refused, its previous rules stay but for what is gone", err)
	}
}

// split returns the changes that can be made without the bad Services, and those of the others, with
// what stays in effect of them as New: the bad Services, and each that loses a frontend to one of
// the others. Nothing stays of a bad Service whose error does not wrap [ruleset.ErrRefused].
func split(changes []ruleset.Change, bad map[tracker.Key]error) (good, left []ruleset.Change) {
	others := map[tracker.Key]bool{}
	for k := range bad {
		others[k] = true
	}
	for before := 0; before != len(others); {
		before = len(others)
		for _, c := range changes {
			for _, winner := range c.LostFrontends() {
				if others[winner] {
					others[c.Key] = true
				}
			}
		}
	}
	for _, c := range changes {
		if !others[c.Key] {
			good = append(good, c)
			continue
		}
		if err := bad[c.Key]; err != nil && !errors.Is(err, ruleset.ErrRefused) {
			c.New = nil
		} else {
			c.New = c.Staying(func(k tracker.Key) bool { return others[k] })
		}
		left = append(left, c)
	}
	return good, left
}
