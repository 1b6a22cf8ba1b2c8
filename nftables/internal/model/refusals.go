package model

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"

	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/tracker"
)

// plan plans the changes of a delta. It leaves Services that cannot be programmed as they were.
type plan struct {
	*Tables
	changes []ruleset.Change
	// full is set if the tables have none of the Services yet. clusterIPs then gets the elements of
	// the set of cluster IPs, which follow all Services.
	full       bool
	clusterIPs []Edit
	// takers holds the place of each Service that gets a frontend of another one.
	takers map[tracker.Key]int
	// left holds the Services that stay as they were: those that cannot be programmed, and those that lose a
	// frontend to one of these. failed has the reasons of all.
	left   map[tracker.Key]bool
	failed map[tracker.Key]error
}

func (m *Tables) newPlan(changes []ruleset.Change) plan {
	p := plan{Tables: m, changes: changes}
	for i := range changes {
		for _, taker := range changes[i].LostFrontends() {
			if p.takers == nil {
				p.takers = map[tracker.Key]int{}
			}
			p.takers[taker] = -1
		}
	}
	for i := range changes {
		if _, ok := p.takers[changes[i].Key]; ok {
			p.takers[changes[i].Key] = i
		}
	}
	return p
}

// services adds the changes.
func (p *plan) services(ctx context.Context) error {
	for i := 0; i < len(p.changes); {
		end := p.circle(i)
		if err := p.add(ctx, p.changes[i:end]); err != nil {
			return err
		}
		i = end
	}
	for i := range p.changes {
		if k := p.changes[i].Key; p.failed[k] != nil && p.Refused != nil {
			p.Refused(k, p.failed[k])
		}
	}
	return nil
}

// circle returns the end of the changes from i on that are planned together. A Service comes after
// those that take a frontend from it, unless they form a circle, or numbers are scarce.
func (p *plan) circle(i int) int {
	end := i + 1
	for k := i; k < end && p.takers != nil; k++ {
		for _, taker := range p.changes[k].LostFrontends() {
			end = max(end, p.takers[taker]+1)
		}
	}
	return end
}

// step is a planned change that is not done.
type step struct {
	planned
	t *Table
}

// add plans changes together. If one of them is refused, add takes all of them back and plans them
// again without it, and without those that lose a frontend to it.
func (p *plan) add(ctx context.Context, changes []ruleset.Change) error {
	start := p.tx.Mark()
	var one [1]step
	steps := one[:0]
	back := func() {
		for _, s := range slices.Backward(steps) {
			s.t.drop(s.planned, p.tx)
		}
		steps = steps[:0]
	}
	for i := 0; i < len(changes); i++ {
		c, known := &changes[i], len(p.left)
		t := p.Table(c.Key.Family)
		if t == nil {
			continue
		}
		what, ok, err := p.try(t, c)
		if err != nil {
			return err
		}
		if ok {
			steps = append(steps, step{what, t})
		}
		if len(p.left) > known && slices.ContainsFunc(changes[:i], func(o ruleset.Change) bool { return loses(&o, c.Key) }) {
			back()
			i = -1
		}
	}
	if len(changes) > 1 && p.tx.Limit != 0 && p.tx.sizeFrom(start) > p.tx.Limit {
		back()
		for i := range changes {
			if err := p.add(ctx, changes[i:i+1]); err != nil {
				return err
			}
		}
		return nil
	}
	for _, s := range steps {
		s.t.done(s.planned, p.tx)
	}
	if p.full {
		p.clusterIPs = p.tx.takeClusterIPs(start, p.clusterIPs)
	}
	return p.room(ctx, start)
}

// loses reports whether a Service loses a frontend to the one with the given key.
func loses(c *ruleset.Change, taker tracker.Key) bool {
	for _, k := range c.LostFrontends() {
		if k == taker {
			return true
		}
	}
	return false
}

// try plans a change, or what stays of a Service that is left as it was. There may be nothing to
// plan. An error is about all changes.
func (p *plan) try(t *Table, c *ruleset.Change) (what planned, ok bool, err error) {
	for _, taker := range c.LostFrontends() {
		if p.left[taker] && !p.left[c.Key] {
			p.leave(c.Key)
			p.fail(c.Key, fmt.Errorf("a frontend moves to %s: %w", taker, p.failed[taker]))
		}
	}
	if !p.left[c.Key] {
		what, err := t.plan(c, p.tx)
		if err == nil || errors.Is(err, ErrOverflow) {
			return what, err == nil, err
		}
		p.leave(c.Key)
		p.fail(c.Key, err)
	}
	stays := *c
	if s := t.service(c.ID()); s != nil {
		stays.Old = s.version
	}
	stays.New = p.staying(&stays)
	if !p.full && stays.New == stays.Old || p.full && stays.New == nil {
		return what, false, nil
	}
	stays.Fields = ruleset.FieldAll
	what, err = t.plan(&stays, p.tx)
	switch {
	case err == nil || errors.Is(err, ErrOverflow):
		return what, err == nil, err
	case !p.full:
		return what, false, fmt.Errorf("cannot remove what others took from service %s: %w", c.Key, err)
	}
	p.fail(c.Key, err) // the table has nothing of it
	return what, false, nil
}

// staying returns c.Old without the frontends that other Services take. Old is what the table has.
func (p *plan) staying(c *ruleset.Change) *ruleset.Port {
	type place struct {
		addr netip.Addr
		port uint16
	}
	var taken map[place]bool
	for f, taker := range c.LostFrontends() {
		if !p.left[taker] {
			if taken == nil {
				taken = map[place]bool{}
			}
			taken[place{f.Addr, f.Port}] = true
		}
	}
	if taken == nil {
		return c.Old
	}
	out := *c.Old
	out.Frontends = slices.DeleteFunc(slices.Clone(out.Frontends), func(f ruleset.Frontend) bool { return taken[place{f.Addr, f.Port}] })
	return &out
}

func (p *plan) leave(k tracker.Key) {
	if p.left == nil {
		p.left = map[tracker.Key]bool{}
	}
	p.left[k] = true
}

func (p *plan) fail(k tracker.Key, err error) {
	if p.failed == nil {
		p.failed = map[tracker.Key]error{}
	}
	p.failed[k] = err
}
