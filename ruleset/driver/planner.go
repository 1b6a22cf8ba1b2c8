package driver

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/tracker"
)

// Plane is a data plane that consists of tables.
type Plane struct {
	// Limits are the limits of the data plane, in both families.
	Limits ruleset.Limits
	// Node, if not nil, writes what depends on the node. It is called before anything else if the node changed and in
	// each full delta. Its error fails the whole delta. If entries of unchanged Services depend on what changed, it
	// returns [ruleset.ErrNeedFull].
	Node func(*ruleset.Node) error
	// Tables are the tables in the order of additions: an entry refers only to entries of
	// earlier tables.
	Tables []Ordered
	// Want calls Want of the tables for each entry that a Service needs. It must want equal
	// entries for equal Services, and writes nothing.
	Want func(*ruleset.Port)
}

// Ordered is a [*Table], a [*Slots] or a [*Numbered].
type Ordered interface{ ordered }

// ordered is what a Driver does with a table. Owners have numbers, and so have the changes of a delta.
type ordered interface {
	// complete checks the functions of the table and sets what is missing.
	complete() error
	// read reads the table.
	read(*ruleset.Delta) error
	// begin and end enclose the calls of Want for an owner. The error of end fails it.
	begin(owner int)
	end(owner int) error
	// reset ends a delta.
	reset()
	// write puts what a change wants.
	write(change int) error
	// hold keeps what an owner may still refer to: what it does not want any more and, if it failed, what
	// it wants.
	hold(owner int, failed bool)
	// remove deletes what an owner does not want any more, early entries only if early is set. It
	// returns false if it leaves an entry that is kept.
	remove(owner int, early bool) (all bool, err error)
	// sweep deletes what no owner wants, unless it is kept.
	sweep() error
}

// Driver is a [ruleset.Backend] that writes a [Plane]. [New] makes one. It is not safe for concurrent use: a
// [ruleset.Cursor] calls Apply from one goroutine at a time. It stores every entry that it wrote.
type Driver struct {
	plane  Plane
	owners map[tracker.Key]*owner
	// free holds the numbers that no owner has.
	free []int
	// failing holds the owners whose last change failed, or was not written to the end, and leaving others that keep
	// unwanted entries.
	failing, leaving map[*owner]bool
	// holds means that owners fail or leave entries after the additions of the current delta.
	holds bool
	// stale is the error of deleting entries that no Service wants.
	stale error
}

// owner is a Service that has or may have entries.
type owner struct {
	key    tracker.Key
	number int
	// gone means that the Service was removed, and failed that its last change was not written.
	gone   bool
	failed error
	// leaves means that it keeps entries that it does not want any more, because a Service failed.
	leaves bool
}

// New returns a Driver. The error wraps [ruleset.ErrConfig]: there is no Want, or a table lacks a function that
// writes or deletes. The tables must not be used by another Driver.
func New(p Plane) (*Driver, error) {
	if p.Want == nil {
		return nil, fmt.Errorf("driver: %w: Want is required", ruleset.ErrConfig)
	}
	for i, t := range p.Tables {
		if err := t.complete(); err != nil {
			return nil, fmt.Errorf("driver: table %d: %w", i, err)
		}
	}
	return &Driver{plane: p, owners: map[tracker.Key]*owner{}, failing: map[*owner]bool{}, leaving: map[*owner]bool{}}, nil
}

// Limits returns the limits of the Plane.
func (d *Driver) Limits(tracker.Family) ruleset.Limits { return d.plane.Limits }

// Apply applies a delta. It returns a [*ruleset.PartialError] that names the Services of which a write failed. After
// any other error the delta was not applied, or stale entries are left for the next delta to delete.
func (d *Driver) Apply(ctx context.Context, delta *ruleset.Delta) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	if d.plane.Node != nil && (delta.Full || delta.Node != delta.OldNode) {
		if err := d.plane.Node(delta.Node); err != nil {
			return err
		}
	}
	if delta.Full {
		for _, t := range d.plane.Tables {
			if err := t.read(delta); err != nil {
				return err
			}
		}
	}
	work := d.plan(delta)
	err := d.write(ctx, work, len(delta.Changes))
	for _, t := range d.plane.Tables {
		t.reset()
	}
	if err != nil {
		for i, o := range work {
			if i < len(delta.Changes) {
				d.failing[o] = true
			} else {
				d.leaving[o] = true
			}
		}
		return err
	}
	return d.finish(work, len(delta.Changes))
}

// write writes what owners want and deletes what they no longer want. The first n owners are in the delta.
func (d *Driver) write(ctx context.Context, work []*owner, n int) error {
	for _, t := range d.plane.Tables {
		for i, o := range work[:n] {
			if err := d.step(ctx, o, func() error { return t.write(i) }); err != nil {
				return err
			}
		}
	}
	d.stale, d.holds = nil, false
	for o := range d.failing {
		d.hold(o, true)
	}
	for _, o := range work {
		if o.leaves = false; o.failed != nil {
			d.hold(o, true)
		}
	}
	for n, t := range slices.Backward(d.plane.Tables) {
		last := n == len(d.plane.Tables)-1
		for _, o := range work {
			if err := d.step(ctx, o, func() error { return d.remove(t, last, o) }); err != nil {
				return err
			}
		}
		if d.mayDeleteEarly(last) {
			d.stale = t.sweep()
		}
	}
	return nil
}

// plan asks for the entries that the Services of a delta want. It returns their owners.
func (d *Driver) plan(delta *ruleset.Delta) []*owner {
	work, planned := make([]*owner, 0, len(delta.Changes)), make(map[tracker.Key]bool, len(delta.Changes))
	for i := range delta.Changes {
		c := &delta.Changes[i]
		o := d.owner(c.Key)
		d.want(o, c.New)
		work, planned[c.Key] = append(work, o), true
	}
	for o := range d.leaving {
		if !planned[o.key] && !delta.Full {
			o.failed = nil
			work = append(work, o)
		}
	}
	if delta.Full {
		for k, o := range d.owners {
			if !planned[k] {
				d.want(o, nil)
				work = append(work, o)
			}
		}
	}
	for _, o := range work {
		delete(d.failing, o)
		delete(d.leaving, o)
	}
	return work
}

func (d *Driver) owner(k tracker.Key) *owner {
	o := d.owners[k]
	if o == nil {
		o = &owner{key: k, number: len(d.owners)}
		if n := len(d.free); n != 0 {
			o.number, d.free = d.free[n-1], d.free[:n-1]
		}
		d.owners[k] = o
	}
	return o
}

func (d *Driver) want(o *owner, s *ruleset.Port) {
	o.gone, o.failed = s == nil, nil
	for _, t := range d.plane.Tables {
		t.begin(o.number)
	}
	if s != nil {
		d.plane.Want(s)
	}
	for _, t := range d.plane.Tables {
		o.failed = errors.Join(o.failed, t.end(o.number))
	}
}

// step writes one table for an owner, unless the owner failed. It returns errors that concern all.
func (d *Driver) step(ctx context.Context, o *owner, write func() error) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	if o.failed == nil {
		o.failed = write()
	}
	if errors.Is(o.failed, ruleset.ErrNeedFull) {
		return o.failed
	}
	return nil
}

// remove deletes from a table what an owner no longer wants.
func (d *Driver) remove(t Ordered, last bool, o *owner) error {
	if o.leaves {
		return nil
	}
	all, err := t.remove(o.number, d.mayDeleteEarly(last))
	if o.leaves = !all; err != nil || o.leaves {
		d.hold(o, err != nil)
	}
	return err
}

// hold keeps what an owner may still refer to.
func (d *Driver) hold(o *owner, failed bool) {
	d.holds = true
	for _, t := range d.plane.Tables {
		t.hold(o.number, failed)
	}
}

// mayDeleteEarly reports whether entries that an earlier process wrote may be deleted. They stay while an entry of a
// later table may refer to them: one that could not be deleted, or one of a Service that failed.
func (d *Driver) mayDeleteEarly(last bool) bool { return d.stale == nil && (last || !d.holds) }

// finish removes the owners that are gone and returns the error of Apply.
func (d *Driver) finish(work []*owner, n int) error {
	failed := map[tracker.Key]error{}
	for i, o := range work {
		switch {
		case o.failed != nil && i >= n:
			d.stale, d.leaving[o] = errors.Join(d.stale, o.failed), true
		case o.failed != nil:
			failed[o.key], d.failing[o] = o.failed, true
		case o.leaves:
			d.leaving[o] = true // the next delta tries again
		case o.gone:
			delete(d.owners, o.key)
			d.free = append(d.free, o.number)
		}
	}
	switch {
	case d.stale != nil:
		return fmt.Errorf("driver: stale entries are left: %w", d.stale)
	case len(failed) != 0:
		return &ruleset.PartialError{Failed: failed}
	}
	return nil
}
