//go:build linux

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
	if !sameRules(f.model.node, node) {
		return nil, ruleset.ErrNeedFull
	}
	if slices.Contains(f.counters, LocalhostNodePorts) && f.model.trees[toNodePorts].ahead == 0 {
		// Another program can delete an object that no rule counts into.
		if err := makeCounters(f.accounts, f.counters); err != nil {
			return nil, f.unknown(err)
		}
	}
	failed := map[tracker.Key]error{}
	// Changes that failed before come last and do not delay the others.
	changes = slices.Clone(changes)
	slices.SortStableFunc(changes, func(a, b ruleset.Change) int {
		return min(1, len(a.Attempted)) - min(1, len(b.Attempted))
	})
	all := parts(changes, f.limit, changeSize)
	if len(all) == 0 {
		all = [][]ruleset.Change{nil} // the node may have changed
	}
	for _, part := range all {
		if err := f.updateSome(ctx, node, part, failed); err != nil {
			return nil, err
		}
	}
	return failed, f.keepRemaining(ctx, node, changes, failed)
}

// keepRemaining removes from the failed Services what is gone: frontends, and endpoints.
func (f *family) keepRemaining(ctx context.Context, node *ruleset.Node, changes []ruleset.Change, failed map[tracker.Key]error) error {
	var left []ruleset.Change
	for _, c := range changes {
		if failed[c.Key] == nil {
			continue
		}
		last := c.Old
		if last == nil {
			last = f.model.services[c.ID()]
		}
		if s := last.Remaining(c.New); s != nil {
			left = append(left, ruleset.Change{Key: c.Key, New: s})
		}
	}
	for _, part := range parts(left, f.limit, changeSize) {
		// What is refused even so stays as it was.
		if err := f.updateSome(ctx, node, part, map[tracker.Key]error{}); err != nil {
			return err
		}
	}
	return nil
}

// parts divides changes into parts of about limit lines. A change that failed before is
// likely to fail again, so it begins a part.
func parts(changes []ruleset.Change, limit int, size func(ruleset.Change) int) [][]ruleset.Change {
	var out [][]ruleset.Change
	start, lines := 0, 0
	for i, c := range changes {
		n := size(c)
		if lines += n; i > start && (lines > limit || len(c.Attempted) != 0) {
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

// updateSome applies some changes at once. If the kernel refuses them, it applies those
// that are not at fault.
func (f *family) updateSome(ctx context.Context, node *ruleset.Node, changes []ruleset.Change, failed map[tracker.Key]error) error {
	for {
		b := newBatch()
		before := f.model.node
		f.model.setNode(node)
		done := make([]undo, 0, len(changes))
		rest := changes[:0:0]
		for _, c := range changes {
			u := undo{c.ID(), f.model.services[c.ID()]}
			if err := f.model.set(c.ID(), c.New, b.difference); err != nil {
				f.fail(failed, c.Key, err)
				continue
			}
			done = append(done, u)
			rest = append(rest, c)
		}
		changes = rest
		f.model.takeChanged(b)
		wrote, err := f.writeBatch(ctx, b, [tables][]string{})
		if err == nil {
			return nil
		}
		if wrote {
			return f.unknown(err)
		}
		for _, u := range slices.Backward(done) {
			if err := f.model.set(u.id, u.service, nil); err != nil {
				return f.unknown(err)
			}
		}
		f.model.setNode(before)
		f.model.takeChanged(newBatch())
		switch {
		case f.smaller(err):
			continue
		case !refused(err) && !tooLarge(err):
			return err
		}
		bad, failure := f.bisect(ctx, f.model, changes)
		if failure != nil {
			return f.unknown(errors.Join(err, failure))
		}
		if len(bad) == 0 {
			return f.unknown(err) // another program changed our chains
		}
		for k, err := range bad {
			f.fail(failed, k, err)
		}
		changes = slices.DeleteFunc(changes, func(c ruleset.Change) bool { return bad[c.Key] != nil })
	}
}

// undo holds a Service as it was before a change.
type undo struct {
	id      uint32
	service *ruleset.Service
}

func (f *family) fail(failed map[tracker.Key]error, k tracker.Key, err error) {
	failed[k] = err
	backendconf.Complain(f.complaints, slog.LevelError, k, "iptables: service refused, its previous rules stay but for what is gone", err)
}
