package ipvs

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"

	"github.com/go-proxier/proxier/ruleset"
)

type entryLists [setCount][]entry

func (l *entryLists) add(e entry) { l[e.set] = append(l[e.set], e) }

// inserts holds elements to add. Several items can need the same element.
type inserts struct {
	lists entryLists
	items map[entry][]*item
	marks map[entry]uint32
}

func (in *inserts) add(e entry, it *item, mark uint32) {
	if in.items[e] == nil {
		in.lists.add(e)
	}
	in.items[e] = append(in.items[e], it)
	if mark != 0 {
		in.marks[e] = mark
	}
}

// lacked reports whether an item that needs the element does without it already.
func (in *inserts) lacked(e entry) bool {
	return slices.ContainsFunc(in.items[e], func(it *item) bool { return slices.Contains(it.lacks, e) })
}

func isAny(entry) bool        { return true }
func isDrop(e entry) bool     { return e.set == setNoLocal || e.set == setNoEndpoints }
func isInternal(e entry) bool { return e.set == setShortCircuit }
func isSource(e entry) bool {
	return e.set == setLoadBalancerSourceIP || e.set == setLoadBalancerSourceCIDR
}

// early reports whether an element is added before the virtual servers: all but those that drop external traffic, or
// refuse all, and late source ranges.
func (it *item) early(e entry) bool { return !isDrop(e) && !it.lateSource(e) }

// lateSource reports whether an element is a source range of a Service port without endpoints. It is added after the
// virtual servers have none: a client that only the new ranges admit must not reach the old endpoints.
func (it *item) lateSource(e entry) bool { return isSource(e) && !it.hasEndpoints() }

func (it *item) hasEndpoints() bool {
	return slices.ContainsFunc(it.plan.virtuals, func(p plannedVirtual) bool { return len(p.pool) != 0 })
}

// restriction returns the element that makes a source range effective.
func restriction(e entry) entry {
	e.set, e.other = setLoadBalancerFW, netip.Prefix{}
	return e
}

func (u *update) insertEntries(kind func(*item, entry) bool) func(context.Context) error {
	return func(context.Context) error {
		in := inserts{items: map[entry][]*item{}}
		for it := range u.remaining {
			for _, e := range it.plan.entries {
				if kind(it, e) && u.s.entries.Claim(it.owner, e) {
					in.add(e, it, 0)
				}
			}
		}
		return u.insert(in)
	}
}

// insertInternal adds the elements that send internal traffic to its own virtual servers,
// with their packet mark.
func (u *update) insertInternal(context.Context) error {
	in := inserts{items: map[entry][]*item{}, marks: map[entry]uint32{}}
	for it := range u.remaining {
		for _, e := range it.plan.internal {
			if u.s.entries.Claim(it.owner, e) || u.s.entryMarks[e] != it.plan.mark {
				in.add(e, it, it.plan.mark)
			}
		}
	}
	return u.insert(in)
}

// insert adds elements, many at a time, those of older Services first.
func (u *update) insert(in inserts) error {
	// This is the reverse of the order of deletion: source ranges come before the set that
	// makes them effective.
	for id, list := range slices.Backward(in.lists[:]) {
		list = slices.DeleteFunc(list, in.lacked)
		if len(list) == 0 {
			continue
		}
		if err := u.b.kernel.addEntries(setID(id), u.s.family, list, in.marks); err == nil {
			for _, e := range list {
				u.s.hasEntry(e, in.marks[e])
			}
			continue
		}
		// Add elements one by one to find the one that the kernel refuses.
		for _, e := range list {
			err := u.b.kernel.addEntries(setID(id), u.s.family, []entry{e}, in.marks)
			switch {
			case err == nil:
				u.s.hasEntry(e, in.marks[e])
			case errors.Is(err, ruleset.ErrNeedFull):
				return err
			default:
				if !errors.Is(err, errSetFull) {
					u.s.entries.Removed(e) // the next attempt writes its mark again
				}
				for _, it := range in.items[e] {
					it.lack(e, err)
				}
			}
		}
	}
	return nil
}

// deleteSources deletes the old source ranges of frontends that have other ranges now, of the same Service port or of
// another, before virtual servers may get endpoints: a client that only the old ranges admit must not reach them.
func (u *update) deleteSources(context.Context) error {
	restricted := map[entry]bool{}
	for _, it := range u.items {
		for _, e := range it.plan.entries {
			if e.set == setLoadBalancerFW && it.hasEndpoints() && !slices.Contains(it.lacks, e) {
				restricted[e] = true
			}
		}
	}
	if len(restricted) == 0 {
		return nil
	}
	old := func(e entry) bool { return isSource(e) && restricted[restriction(e)] }
	for _, it := range u.items {
		u.releaseEntries(it, old)
	}
	return u.deleteUnused(old)
}

func (u *update) deleteEntries(kind func(entry) bool) func(context.Context) error {
	return func(context.Context) error {
		for it := range u.remaining {
			u.releaseEntries(it, kind)
		}
		return u.deleteUnused(kind)
	}
}

// releaseEntries ends an item's claims to the elements of a kind that are not in its plan.
func (u *update) releaseEntries(it *item, kind func(entry) bool) {
	var mine []entry
	for e := range u.s.entries.Items(it.owner) {
		if kind(e) {
			mine = append(mine, e)
		}
	}
	for _, e := range missing(missing(mine, it.plan.entries), it.plan.internal) {
		u.s.entries.Release(it.owner, e)
	}
}

func (u *update) deleteUnused(kind func(entry) bool) error {
	var lists entryLists
	for e := range u.s.entries.Unused() {
		if kind(e) {
			lists.add(e)
		}
	}
	for id, list := range lists {
		if len(list) == 0 {
			continue
		}
		slices.SortFunc(list, entry.compare)
		if err := u.b.kernel.delEntries(setID(id), u.s.family, list); err != nil {
			// The elements have no owner whose retry would delete them.
			return fmt.Errorf("%w: %w", ruleset.ErrNeedFull, err)
		}
		for _, e := range list {
			u.s.entries.Removed(e)
			delete(u.s.entryMarks, e)
		}
	}
	return nil
}
