//go:build linux

package ipvs

import (
	"errors"
	"fmt"
	"os"
	"slices"

	"github.com/vishvananda/netlink/nl"

	"github.com/go-proxier/proxier/ruleset"
)

// entryLists holds elements by set.
type entryLists [setCount][]entry

func (l *entryLists) add(e entry) { l[e.set] = append(l[e.set], e) }

// insert adds elements of all items, many at a time. If internal is set, it adds the
// elements that send internal traffic to its own virtual servers, with their packet mark;
// if not, all others.
func (u *update) insert(internal bool) error {
	var lists entryLists
	owners := map[entry]*item{}
	marks := map[entry]uint32{}
	for _, it := range u.items {
		if u.failed[it.key] != nil {
			continue
		}
		entries, mark := it.plan.entries, uint32(0)
		if internal {
			entries, mark = it.plan.internal, it.plan.mark
		}
		for _, e := range missing(entries, it.state.entries) {
			it.state.entries = append(it.state.entries, e)
			if u.s.entries.take(e) {
				lists.add(e)
				owners[e] = it
			}
		}
		if mark == 0 {
			continue
		}
		for _, e := range entries {
			if u.s.entries[e].value != mark {
				if owners[e] == nil {
					lists.add(e)
				}
				owners[e], marks[e] = it, mark
			}
		}
	}
	for id, list := range lists {
		if len(list) == 0 {
			continue
		}
		if err := u.b.sets.change(nl.IPSET_CMD_ADD, setID(id), u.s.family, list, marks); err == nil {
			for _, e := range list {
				u.s.entries.set(e, marks[e])
			}
			continue
		}
		// Add elements one by one to find the one that the kernel refuses.
		for _, e := range list {
			err := u.b.sets.change(nl.IPSET_CMD_ADD, setID(id), u.s.family, []entry{e}, marks)
			switch {
			case err == nil:
				u.s.entries.set(e, marks[e])
			case errors.Is(err, ruleset.ErrNeedFull), errors.Is(err, os.ErrClosed):
				return err
			default:
				u.failed[owners[e].key] = err
				u.disown(e)
			}
		}
	}
	return nil
}

// disown removes an element that could not be added from all of its owners, so that they
// add it when they are applied again.
func (u *update) disown(e entry) {
	delete(u.s.entries, e)
	for _, it := range u.items {
		it.state.entries = slices.DeleteFunc(it.state.entries, func(x entry) bool { return x == e })
	}
}

// dropUnplanned deletes elements that have no owner any more. If internal is set, these
// are the elements of internal traffic; if not, all others.
func (u *update) dropUnplanned(internal bool) error {
	var lists entryLists
	for _, it := range u.items {
		if u.failed[it.key] != nil {
			continue
		}
		wanted := it.plan.entries
		if internal {
			wanted = it.plan.internal
		}
		var mine []entry
		for _, e := range it.state.entries {
			if (e.set == setShortCircuit) == internal {
				mine = append(mine, e)
			}
		}
		gone := missing(mine, wanted)
		if len(gone) == 0 {
			continue
		}
		it.state.entries = missing(it.state.entries, gone)
		for _, e := range gone {
			if u.s.entries.drop(e) {
				lists.add(e)
			}
		}
	}
	return u.deleteEntries(lists)
}

// deleteEntries deletes elements from the kernel's sets.
func (u *update) deleteEntries(lists entryLists) error {
	for id, list := range lists {
		if len(list) == 0 {
			continue
		}
		if err := u.b.sets.change(nl.IPSET_CMD_DEL, setID(id), u.s.family, list, nil); err != nil {
			// Ownership information is already gone, so only a full resync can recover.
			return fmt.Errorf("%w: %w", ruleset.ErrNeedFull, err)
		}
		for _, e := range list {
			delete(u.s.entries, e)
		}
	}
	return nil
}
