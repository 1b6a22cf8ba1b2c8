// Package ids gives out small numbers that name things in a data plane and that
// survive a restart: group IDs of a switch, indexes of a BPF array.
//
//	a, err := ids.New[Group](1, 65535)
//	...
//	for id, group := range found { // what an earlier process left
//		if err := a.Adopt(group, id); err != nil {
//			a.Reserve(id) // two IDs for one group: not given out until it is removed
//		}
//	}
//	...
//	id, err := a.Get(group) // the same as before the restart
//	...
//	if err := remove(id); err == nil {
//		a.Release(group)
//	}
//
// [ruleset.Service.ID] is not such a number: each Engine numbers its Services again.
// A data plane that finds its tables after a restart names what is in them by
// something that stays, such as [tracker.Key], or by IDs from here.
//
// [Allocator.Get] returns the same ID for the same key until it is released, so a
// step that failed is simply done again. An ID must be released only after the data
// plane has nothing under it: a caller whose removal failed does not call Release,
// and the ID stays with its key. IDs that were released are given out again, the one
// released first before others, and before numbers that were never used.
package ids
