package dataplane

import (
	"context"
	"errors"
	"maps"

	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/tracker"
)

// ByFamily joins two backends, one for each address family. Each gets the changes of its own family; Triggers and the
// rest are the same for both. Nil means that the family is not served. Apply always calls both, v4 first.
//
// If one of them fails, Apply reports the Services of its family as failed in a [*ruleset.PartialError]. If the delta
// is Full or changes the Node, this would acknowledge too much; both then get a full delta, as both do after an
// [ruleset.ErrNeedFull] of either.
func ByFamily(v4, v6 ruleset.Backend) ruleset.Backend {
	return &byFamily{v4: v4, v6: v6}
}

type byFamily struct{ v4, v6 ruleset.Backend }

// Limits returns the limits of the family's backend.
func (b *byFamily) Limits(f tracker.Family) ruleset.Limits {
	side := b.v4
	if f == tracker.IPv6 {
		side = b.v6
	}
	return ruleset.LimitsOf(side, f)
}

func (b *byFamily) Apply(ctx context.Context, d *ruleset.Delta) error {
	var failed []error
	partial := &ruleset.PartialError{Failed: map[tracker.Key]error{}}
	for _, side := range []struct {
		family  tracker.Family
		backend ruleset.Backend
	}{{tracker.IPv4, b.v4}, {tracker.IPv6, b.v6}} {
		if side.backend == nil {
			continue
		}
		part := *d
		part.Changes = changesOf(d.Changes, side.family)
		if len(part.Changes) == 0 && !d.Full && d.Node == d.OldNode {
			continue
		}
		err := side.backend.Apply(ctx, &part)
		var p *ruleset.PartialError
		switch {
		case err == nil:
		case errors.Is(err, ruleset.ErrNeedFull):
			failed = append(failed, err)
		case errors.As(err, &p) && p != nil:
			maps.Copy(partial.Failed, p.Failed)
		case d.Full || d.Node != d.OldNode:
			failed = append(failed, err)
		default:
			for i := range part.Changes {
				partial.Failed[part.Changes[i].Key] = err
			}
		}
	}
	if len(failed) != 0 {
		// The other backend may have succeeded, and would take this delta for acknowledged.
		return errors.Join(append(failed, ruleset.ErrNeedFull)...)
	}
	if len(partial.Failed) != 0 {
		return partial
	}
	return nil
}

// Traffic joins the counters of both backends. Known holds the counters that both
// have. A backend that is not a [TrafficReader] has no counters.
func (b *byFamily) Traffic(ctx context.Context) (*Traffic, error) {
	var out *Traffic
	for _, side := range []ruleset.Backend{b.v4, b.v6} {
		if side == nil {
			continue
		}
		t := &Traffic{}
		if r, ok := side.(TrafficReader); ok {
			var err error
			if t, err = r.Traffic(ctx); err != nil {
				return nil, err
			}
		}
		if out == nil {
			out = t
			continue
		}
		joined := &Traffic{Known: out.Known & t.Known, Services: map[tracker.Key]Counters{}}
		maps.Copy(joined.Services, out.Services)
		maps.Copy(joined.Services, t.Services)
		out = joined
	}
	if out == nil {
		out = &Traffic{}
	}
	return out, nil
}

// changesOf returns the changes of one family. It does not copy if all are of the
// family.
func changesOf(all []ruleset.Change, f tracker.Family) []ruleset.Change {
	n := 0
	for i := range all {
		if all[i].Key.Family == f {
			n++
		}
	}
	if n == len(all) {
		return all
	}
	out := make([]ruleset.Change, 0, n)
	for i := range all {
		if all[i].Key.Family == f {
			out = append(out, all[i])
		}
	}
	return out
}
