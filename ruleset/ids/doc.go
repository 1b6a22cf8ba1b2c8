// Package ids allocates small numbers for objects in a data plane, such as group IDs of
// a switch or indexes of a BPF array, and keeps them across restarts.
//
//	a, err := ids.New[Group](1, 65535)
//	...
//	for id, group := range found { // objects of an earlier process
//		if err := a.Adopt(group, id); err != nil {
//			a.Reserve(id) // a second ID of one group: not allocated until it is removed
//		}
//	}
//	...
//	id, err := a.Get(group) // the same as before the restart
//	...
//	if err := remove(id); err == nil {
//		a.Release(group)
//	}
//
// [ruleset.Service.ID] does not survive a restart: each Engine numbers its Services from
// the start. A data plane that reads its tables after a restart must name the contents by
// something permanent, such as [tracker.Key], or by IDs of this package.
//
// [Allocator.Get] returns the same ID for a key until the key is released, so a failed
// step can be repeated. Release an ID only after the data plane has removed its object:
// if the removal fails, do not call Release, and the ID stays with its key. Released IDs
// are allocated again, the longest unused first, before numbers that were never used.
package ids
