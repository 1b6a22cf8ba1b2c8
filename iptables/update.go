package iptables

import (
	"cmp"
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
	if !sameRules(f.model.node, node) || slices.ContainsFunc(changes, func(c ruleset.Change) bool { return !f.model.knows(c) }) {
		return nil, ruleset.ErrNeedFull
	}
	if slices.Contains(f.counters, LocalhostNodePorts) && f.model.trees[toNodePorts].ahead == 0 {
		// Another program can delete an object that no rule counts into.
		if err := makeCounters(f.accounts, f.counters); err != nil {
			return nil, f.discard(err)
		}
	}
	bad := map[tracker.Key]error{}
	// Changes that failed before come last and do not delay the others.
	changes = slices.Clone(changes)
	slices.SortStableFunc(changes, func(a, b ruleset.Change) int {
		return min(1, len(a.Attempted)) - min(1, len(b.Attempted))
	})
	joined := joinTakeovers(changes)
	all := parts(changes, joined, f.limit, changeSize)
	if len(all) == 0 {
		all = [][]ruleset.Change{nil} // the node may have changed
	}
	for _, part := range all {
		if err := f.updateSome(ctx, node, part, bad); err != nil {
			return nil, err
		}
	}
	return bad, f.keepRemaining(ctx, node, changes, bad)
}

// keepRemaining removes from the bad Services what is gone: frontends, and endpoints.
func (f *family) keepRemaining(ctx context.Context, node *ruleset.Node, changes []ruleset.Change, bad map[tracker.Key]error) error {
	var left []ruleset.Change
	for _, c := range changes {
		if bad[c.Key] == nil {
			continue
		}
		last := c.Old
		if last == nil {
			last = f.model.programmed(c)
		}
		if s := last.Remaining(c.Keeping(node, bad)); s != nil {
			left = append(left, ruleset.Change{Key: c.Key, Old: c.Old, New: s})
		}
	}
	for _, part := range parts(left, nil, f.limit, changeSize) {
		// What is refused even so stays as it was.
		if err := f.updateSome(ctx, node, part, map[tracker.Key]error{}); err != nil {
			return err
		}
	}
	return nil
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
	// The last change of a group comes first: if one of the group failed before, it did.
	slices.SortStableFunc(changes, func(a, b ruleset.Change) int {
		return cmp.Or(find(at[a.Key])-find(at[b.Key]), at[b.Key]-at[a.Key])
	})
	joined = make([]bool, len(changes))
	for i := 1; i < len(changes); i++ {
		joined[i] = find(at[changes[i].Key]) == find(at[changes[i-1].Key])
	}
	return joined
}

// parts divides changes into parts of about limit lines, but not before a joined one. A change
// that failed before is likely to fail again, so it begins a part.
func parts(changes []ruleset.Change, joined []bool, limit int, size func(ruleset.Change) int) [][]ruleset.Change {
	var out [][]ruleset.Change
	start, lines := 0, 0
	for i, c := range changes {
		n := size(c)
		if lines += n; i > start && (joined == nil || !joined[i]) && (lines > limit || len(c.Attempted) != 0) {
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
func size(s *ruleset.Service) int {
	if s == nil {
		return 0
	}
	return 3*len(s.Selection.Reachable) + 4*len(s.Frontends) + 2*leafRules
}

// updateSome writes some changes together. If they are rejected, it finds the Services at fault,
// adds them to bad, and writes the others.
func (f *family) updateSome(ctx context.Context, node *ruleset.Node, changes []ruleset.Change, bad map[tracker.Key]error) error {
	for {
		b := newBatch()
		undo := f.prepare(b, node, &changes, bad)
		out := f.writeBatch(ctx, b, [tables][]string{})
		if out.result == done {
			for _, c := range changes {
				f.model.ahead[c.ID()] = c.New
			}
			f.dropKept(changes)
			return nil
		}
		if err := undo(); err != nil || out.result == unsure {
			return f.discard(errors.Join(out.err, err))
		}
		if f.shrink(out) {
			continue
		}
		if !out.rejected() {
			return out.err
		}
		refused, err := f.bisect(ctx, f.model, changes)
		if err != nil {
			return f.discard(errors.Join(out.err, err))
		}
		if len(refused) == 0 {
			return f.discard(out.err) // another program changed our chains
		}
		for k, err := range refused {
			f.refuse(bad, k, err)
		}
		changes = slices.DeleteFunc(changes, func(c ruleset.Change) bool { return refused[c.Key] != nil })
	}
}

// prepare makes the changes in the model and adds the chains that differ to b. It removes the
// changes that cannot be rendered and adds their Services to bad. Services keep the frontends that
// bad Services were to take from them. undo reverts the model.
func (f *family) prepare(b *batch, node *ruleset.Node, changes *[]ruleset.Change, bad map[tracker.Key]error) (undo func() error) {
	m, before := f.model, f.model.node
	m.setNode(node)
	good := (*changes)[:0:0]
	for _, c := range *changes {
		if err := m.change(m.programmed(c), c.New, b.difference); err != nil {
			f.refuse(bad, c.Key, err)
			continue
		}
		good = append(good, c)
	}
	for i := range good {
		c := &good[i]
		kept := c.Keeping(node, bad)
		if kept == c.New {
			continue
		}
		// The rules of these frontends are in the tables, so this cannot fail.
		if err := m.change(c.New, kept, b.difference); err == nil {
			c.New = kept
		}
	}
	*changes = good
	m.takeChanged(b)
	return func() error {
		defer m.forgetChanged()
		m.setNode(before)
		for _, c := range slices.Backward(good) {
			if err := m.change(c.New, m.programmed(c), nil); err != nil {
				return err
			}
		}
		return nil
	}
}

// refuse adds a Service to bad and logs it.
func (f *family) refuse(bad map[tracker.Key]error, k tracker.Key, err error) {
	bad[k] = err
	backendconf.Complain(f.complaints, slog.LevelError, k, "iptables: service refused, its previous rules stay but for what is gone", err)
}
