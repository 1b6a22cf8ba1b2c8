package ruleset

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"

	"github.com/go-proxier/proxier/tracker"
)

// Gate returns a backend that calls step with each change before b applies it, for example to prepare a pod, open a
// port or reserve an address. If step returns an error, b is not offered the change and keeps what it has of the
// Service, and Apply names the Service in a [*PartialError]. A Service that loses a frontend to one that waits waits
// too. A Service that waits gives up the frontends that others take.
//
// step is called again with each attempt, with each Full delta and with removals. It must be idempotent and must not
// be nil. The result has the limits of b.
func Gate(b Backend, step func(context.Context, Change) error) Backend { return &gate{b, step} }

type gate struct {
	Backend
	step func(context.Context, Change) error
}

// Limits implements [Limiter].
func (g *gate) Limits(f tracker.Family) Limits { return LimitsOf(g.Backend, f) }

// Apply implements [Backend].
func (g *gate) Apply(ctx context.Context, d *Delta) error {
	wait := map[tracker.Key]error{}
	for _, c := range d.Changes {
		if err := g.step(ctx, c); err != nil {
			wait[c.Key] = err
		}
	}
	if len(wait) == 0 {
		return g.Backend.Apply(ctx, d)
	}
	for n := 0; n != len(wait); {
		n = len(wait)
		for i := range d.Changes {
			c := &d.Changes[i]
			for _, m := range c.lost {
				if cause := wait[m.key]; cause != nil && wait[c.Key] == nil {
					wait[c.Key] = fmt.Errorf("a frontend moves to %s: %w", m.key, cause)
				}
			}
		}
	}
	part := *d
	part.Changes = nil
	for _, c := range d.Changes {
		if wait[c.Key] != nil {
			if c = c.without(func(k tracker.Key) bool { return wait[k] != nil }); c.New == nil || !d.Full && len(c.lost) == 0 {
				continue
			}
		}
		part.Changes = append(part.Changes, c)
	}
	err := error(nil)
	if d.Full || len(part.Changes) != 0 || d.Node != d.OldNode {
		err = g.Backend.Apply(ctx, &part)
	}
	var p *PartialError
	if partly := errors.As(err, &p) && !errors.Is(err, ErrNeedFull); err != nil && !partly {
		return err
	} else if partly {
		maps.Copy(wait, p.Failed)
	}
	return &PartialError{Failed: wait}
}

// without returns a change from Old to Old without the frontends that move to Services which do not wait.
func (c Change) without(waits func(tracker.Key) bool) Change {
	c.lost = slices.DeleteFunc(slices.Clone(c.lost), func(m move) bool { return waits(m.key) })
	c.New, c.taken = c.Old, nil
	if len(c.lost) == 0 {
		return c
	}
	taken := newFinder(c.lost, move.frontend)
	now := *c.Old
	now.Frontends = slices.DeleteFunc(slices.Clone(now.Frontends), func(f Frontend) bool { return taken.has(l4KeyOf(c.Old, &f)) })
	if c.New = &now; c.Fields != FieldAll {
		c.Fields = diff(c.Old, c.New)
	}
	return c
}
