//go:build linux

package iptables

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"slices"

	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/tracker"
)

// update applies changes to tables that are as they were left. It returns the
// Services that were refused.
func (f *family) update(ctx context.Context, node *ruleset.Node, changes []ruleset.Change) (map[tracker.Key]error, error) {
	if !sameRules(f.model.node, node) {
		return nil, ruleset.ErrNeedFull
	}
	if f.counters.localhost && f.model.trees[toNodePorts].ahead == 0 {
		// An object that no rule counts into can be deleted by anybody.
		if err := makeCounters(f.accounts, f.counters); err != nil {
			return nil, f.forget(err)
		}
	}
	failed := map[tracker.Key]error{}
	// What failed before is likely to fail again: it is kept apart from the rest.
	changes = slices.Clone(changes)
	slices.SortStableFunc(changes, func(a, b ruleset.Change) int {
		return min(1, len(a.Attempted)) - min(1, len(b.Attempted))
	})
	for first := true; first || len(changes) != 0; first = false {
		n, lines := 0, 0
		for n < len(changes) && (n == 0 || lines < f.limit && len(changes[n].Attempted) == 0) {
			lines += changeSize(changes[n])
			n++
		}
		if err := f.updateSome(ctx, node, changes[:n], failed); err != nil {
			return nil, err
		}
		changes = changes[n:]
	}
	return failed, nil
}

// changeSize is about how many lines a change takes. The chains that lead to a Service
// are written anew only if its frontends, or what becomes of a connection there, are
// others.
func changeSize(c ruleset.Change) int {
	if c.Old != nil && c.New != nil && slices.EqualFunc(c.Old.Frontends, c.New.Frontends, func(a, b ruleset.Frontend) bool {
		return a.Kind == b.Kind && a.Addr == b.Addr && a.Port == b.Port && a.Target == b.Target && a.Near == b.Near
	}) {
		return 3*len(c.New.Selection.Reachable) + len(c.Old.Selection.Reachable) + leafRules
	}
	return size(c.New) + size(c.Old)
}

// size is about how many lines a Service takes.
func size(s *ruleset.Service) int {
	if s == nil {
		return 0
	}
	return 3*len(s.Selection.Reachable) + 4*len(s.Frontends) + 2*leafRules
}

// updateSome applies some changes, all at once or, if that is refused, without
// those that are at fault.
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
			return f.forget(err)
		}
		for _, u := range slices.Backward(done) {
			if err := f.model.set(u.id, u.service, nil); err != nil {
				return f.forget(err)
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
		bad, blame := f.blame(ctx, f.model, changes)
		if blame != nil {
			return f.forget(errors.Join(err, blame))
		}
		if len(bad) == 0 {
			return f.forget(err) // somebody else changed what it relies on
		}
		for k, err := range bad {
			f.fail(failed, k, err)
		}
		changes = slices.DeleteFunc(changes, func(c ruleset.Change) bool { return bad[c.Key] != nil })
	}
}

// undo is what a Service was before.
type undo struct {
	id      uint32
	service *ruleset.Service
}

func (f *family) fail(failed map[tracker.Key]error, k tracker.Key, err error) {
	failed[k] = err
	f.log.Error("iptables: service left as it was", slog.String("service", k.String()), slog.Any("error", err))
}

// writeBatch writes the filter table before nat: an address to which packets are
// no longer sent on refuses them already.
func (f *family) writeBatch(ctx context.Context, b *batch, commands [tables][]string) (wrote bool, err error) {
	for t := range tables {
		var mark canaryMark
		w, err := f.write(ctx, b.inputs(t, commands[t], f.limit, mark.rule))
		if err != nil {
			return wrote || w, err
		}
		if w {
			f.canary[t] = mark.last
		}
		wrote = wrote || w
	}
	return wrote, nil
}

// canaryMark makes what a canary says: something else after each input, so that a
// table that is put back to what it was earlier does not look up to date.
type canaryMark struct{ last string }

func (m *canaryMark) rule() string {
	m.last = comment(fmt.Sprintf("%s%016x", canaryText, rand.Uint64()))
	return m.last
}

const canaryText = "kubernetes service rules as of change "
