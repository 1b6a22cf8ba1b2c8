//go:build linux

package ipvs

import (
	"slices"

	"github.com/go-proxier/proxier/tracker"
)

// prune removes everything from the kernel that no Service wants.
func (u *update) prune() error {
	u.adoptFailed()
	var lists entryLists
	for e := range u.s.entries.unowned {
		if e.set == setShortCircuit {
			lists.add(e)
		}
	}
	if err := u.deleteEntries(lists); err != nil {
		return err
	}
	for k, v := range u.s.virtuals {
		if v.owner != (tracker.Key{}) {
			continue
		}
		if !u.s.recognised(u.b.config, k) {
			delete(u.s.virtuals, k)
			delete(u.s.drainingReals, k)
			continue
		}
		if err := u.retire(k, v); err != nil {
			return err
		}
	}
	u.s.abandoned = slices.AppendSeq(u.s.abandoned, u.s.bound.unowned)
	lists = entryLists{}
	for e := range u.s.entries.unowned {
		lists.add(e)
	}
	return u.deleteEntries(lists)
}

// adoptFailed makes failed items the owners of the objects in their plans that the kernel
// has. These objects stay as they are.
func (u *update) adoptFailed() {
	for _, it := range u.items {
		if u.failed[it.key] == nil {
			continue
		}
		for i := range it.plan.virtuals {
			p := &it.plan.virtuals[i]
			if v := u.s.virtuals[p.key]; v != nil && v.owner == (tracker.Key{}) {
				v.owner, v.proto = it.key, p.proto
				it.state.virtuals = append(it.state.virtuals, p.key)
			}
		}
		for _, a := range it.plan.bind {
			if u.s.bound.has(a) && !slices.Contains(it.state.bound, a) {
				u.s.bound.take(a)
				it.state.bound = append(it.state.bound, a)
			}
		}
		for _, e := range slices.Concat(it.plan.entries, it.plan.internal) {
			if u.s.entries.has(e) && !slices.Contains(it.state.entries, e) {
				u.s.entries.take(e)
				it.state.entries = append(it.state.entries, e)
			}
		}
	}
}
