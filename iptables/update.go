package iptables

import (
	"context"
	"slices"

	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/tracker"
)

func (f *family) update(ctx context.Context, node *ruleset.Node, changes []ruleset.Change) error {
	if !sameRules(f.model.node, node) {
		return ruleset.ErrNeedFull
	}
	if slices.Contains(f.counters, LocalhostNodePorts) && f.model.trees[toNodePorts].ahead == 0 {
		// Another program can delete an object that no rule counts into.
		if err := makeCounters(f.accounts, f.counters); err != nil {
			return f.discard(err)
		}
	}
	changes = f.model.fromWritten(changes)
	f.logIgnored(changes)
	all := parts(changes, joinTakeovers(changes), f.limit)
	if len(all) == 0 {
		all = [][]ruleset.Change{nil} // the node may have changed
	}
	for _, part := range all {
		if err := f.updateSome(ctx, node, part); err != nil {
			return err
		}
	}
	return nil
}

// joinTakeovers moves the changes of Services that take frontends from each other together. joined[i] reports that
// change i must be written with the one before it. joined is nil if no frontend moves.
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
func parts(changes []ruleset.Change, joined []bool, limit int) [][]ruleset.Change {
	var out [][]ruleset.Change
	start, lines := 0, 0
	for i, c := range changes {
		n := changeSize(c)
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

// changeSize returns about how many lines a change takes.
func changeSize(c ruleset.Change) int {
	if c.Old != nil && c.New != nil && slices.EqualFunc(c.Old.Frontends, c.New.Frontends, func(a, b ruleset.Frontend) bool {
		return a.Kind == b.Kind && a.Addr == b.Addr && a.Port == b.Port && a.Target == b.Target && a.Internal == b.Internal
	}) {
		return 3*len(c.New.Selection.Reachable) + len(c.Old.Selection.Reachable) + leafRules
	}
	return size(c.New) + size(c.Old)
}

func size(s *ruleset.Port) int {
	if s == nil {
		return 0
	}
	return 3*len(s.Selection.Reachable) + 4*len(s.Frontends) + 2*leafRules
}

// updateSome writes some changes together. If an input is refused, another program has changed our
// chains.
func (f *family) updateSome(ctx context.Context, node *ruleset.Node, changes []ruleset.Change) error {
	for {
		tx := f.Renderer.update(node, changes)
		out := f.writeBatch(ctx, tx.batch, [tables][]string{})
		if out.result == done {
			f.dropKept(changes)
			return nil
		}
		tx.Revert()
		switch {
		case f.shrink(out):
			continue
		case out.result == failed:
			return out.err
		}
		return f.discard(out.err)
	}
}
