package ruleset

import (
	"errors"
	"iter"
	"slices"

	"github.com/go-proxier/proxier/tracker"
)

// Outcome yields each change of d and what an Apply that returned err made of it. New is what is in
// effect now: the wanted version, or what [Change.Staying] returns of a Service that the backend
// left as it was, which may be Old. If known is false, the change failed, and parts of it may be in
// effect. So a Backend that wraps another one learns what the [Cursor] will learn, partial errors
// included. Outcome takes time proportional to the changes.
func (d *Delta) Outcome(err error) iter.Seq2[Change, bool] {
	return func(yield func(Change, bool) bool) {
		o := d.outcome(err)
		for i := range d.Changes {
			c := d.Changes[i]
			now, known := o.of(&c)
			if known && now != c.New {
				c.New, c.Fields = now, diff(c.Old, now)
			}
			if !yield(c, known) {
				return
			}
		}
	}
}

// outcome is the result of an Apply.
type outcome struct {
	// all and some: the backend acknowledged all of the delta, or all but the Services in failed,
	// those in left and those that lose a frontend to them. nothing: it wrote nothing.
	all, some, nothing bool
	// pruned and restored are [PartialError].Pruned and Restored, for a full delta.
	pruned, restored bool
	failed           map[tracker.Key]error
	// left holds what the backend left as it was, by key.
	left map[tracker.Key]*left
}

func (d *Delta) outcome(err error) outcome {
	var p *PartialError
	switch {
	case err == nil:
		return outcome{all: true}
	case errors.Is(err, ErrNeedFull):
		return outcome{}
	case errors.As(err, &p) && p != nil:
		o := outcome{some: true, pruned: d.Full && p.Pruned, restored: d.Full && p.Restored, failed: p.Failed}
		o.leave(d.Changes)
		return o
	}
	return outcome{nothing: errors.Is(err, ErrRefused)}
}

// leave finds the changes that the backend left as they were: those of the Services that it
// refused, and of those that lose a frontend to one of these. A removal cannot be refused.
func (o *outcome) leave(changes []Change) {
	for i := range changes {
		if c := &changes[i]; c.New != nil && errors.Is(o.failed[c.Key], ErrRefused) {
			if o.left == nil {
				o.left = map[tracker.Key]*left{}
			}
			o.left[c.Key] = &left{Change: *c, refused: true}
		}
	}
	for more := len(o.left) != 0; more; {
		more = false
		for i := range changes {
			c := &changes[i]
			waits := func(m move) bool { return o.left[m.key] != nil }
			if o.failed[c.Key] == nil && o.left[c.Key] == nil && slices.ContainsFunc(c.lost, waits) {
				o.left[c.Key], more = &left{Change: *c}, true
			}
		}
	}
	for _, l := range o.left {
		l.unsure = l.again && !o.restored || slices.ContainsFunc(l.lost, func(m move) bool {
			return o.failed[m.key] != nil && (o.left[m.key] == nil || !o.left[m.key].refused)
		})
	}
}

// of returns what is in effect of c. known is false if c failed.
func (o *outcome) of(c *Change) (now *Port, known bool) {
	l := o.left[c.Key]
	switch {
	case o.all:
		return c.New, true
	case o.nothing && !c.again:
		return c.Old, true
	case !o.some || l != nil && l.unsure:
		return nil, false
	case l != nil:
		return c.Staying(func(k tracker.Key) bool { return o.left[k] != nil }), true
	}
	_, failed := o.failed[c.Key]
	// The data plane may still serve this Service's frontend, which a failed Service was to take
	// over. Its ID must not be reused before that.
	failed = failed || slices.ContainsFunc(c.lost, func(m move) bool {
		_, waits := o.failed[m.key]
		return waits
	})
	return c.New, !failed
}
