package ipvs

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"sync"

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

// early reports whether an element is added before the virtual servers change: all but those that drop external
// traffic, or refuse all, and late source ranges.
func (u *update) early(e entry) bool { return !isDrop(e) && !u.lateSource(e) }

// lateSource reports whether an element is a source range that admits more clients than the frontend's old ones. It is
// added after the virtual servers have changed: these clients must not reach the old endpoints.
func (u *update) lateSource(e entry) bool { return isSource(e) && !u.old.admit(e) }

// restriction returns the element that makes a source range effective.
func restriction(e entry) entry {
	e.set, e.other = setLoadBalancerFW, netip.Prefix{}
	return e
}

// sources holds the source ranges of restricted frontends, by the element that makes them effective.
type sources map[entry]map[netip.Prefix]bool

func (s sources) add(e entry) {
	if !isSource(e) && e.set != setLoadBalancerFW {
		return
	}
	ranges := s[restriction(e)]
	if ranges == nil {
		ranges = map[netip.Prefix]bool{}
		s[restriction(e)] = ranges
	}
	ranges[e.other] = isSource(e)
}

// admit reports whether a frontend admits all clients of a source range. Two ranges are nested or disjoint.
func (s sources) admit(e entry) bool {
	ranges, restricted := s[restriction(e)]
	for bits := e.other.Bits(); restricted && bits >= 0; bits-- {
		if p, _ := e.other.Addr().Prefix(bits); ranges[p] {
			return true
		}
	}
	return !restricted
}

// readSources stores the source ranges that are in effect before the update.
func (u *update) readSources(context.Context) error {
	u.old = sources{}
	add := func(e entry) {
		if u.s.entries.Has(e) && u.s.entries.Has(restriction(e)) {
			u.old.add(e)
		}
	}
	for _, it := range u.items {
		for e := range u.s.entries.Items(it.owner) {
			add(e)
		}
	}
	for e := range u.s.entries.Unused() {
		add(e)
	}
	return nil
}

func (u *update) insertEntries(kind func(entry) bool) func(context.Context) error {
	return func(context.Context) error {
		in := inserts{items: map[entry][]*item{}}
		for it := range u.remaining {
			for _, e := range it.plan.entries {
				if kind(e) && u.s.entries.Claim(it.owner, e) {
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

// deleteSources deletes the old source ranges of frontends whose new ones, of the same Service port or of another, admit
// fewer clients, before virtual servers get endpoints: a client that only the old ranges admit must not reach them.
func (u *update) deleteSources(context.Context) error {
	planned := sources{}
	for _, it := range u.items {
		for _, e := range it.plan.entries {
			if !slices.Contains(it.lacks, restriction(e)) {
				planned.add(e)
			}
		}
	}
	if len(planned) == 0 {
		return nil
	}
	old := func(e entry) bool { return isSource(e) && !planned.admit(e) }
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
	planned := sync.OnceValue(func() map[entry]bool {
		in := map[entry]bool{}
		for _, e := range slices.Concat(it.plan.entries, it.plan.internal) {
			in[e] = true
		}
		return in
	})
	for e := range u.s.entries.Items(it.owner) {
		if kind(e) && !planned()[e] {
			u.s.entries.Release(it.owner, e)
		}
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
