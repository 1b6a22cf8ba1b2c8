package ruleset

import (
	"slices"

	"k8s.io/apimachinery/pkg/types"

	"github.com/go-proxier/proxier/tracker"
)

// leastShare: a delta has at least a 32nd of all waiting changes. Each delta examines all that are left, so their
// number must not grow with the changes.
const leastShare = 32

// deltaSize returns the size of an incremental delta, or 0 if deltas are not divided.
func (c *Cursor) deltaSize() int {
	most := c.engine.budget.Delta
	for _, l := range c.limits {
		if l.Delta != 0 {
			most = min(most, l.Delta)
		}
	}
	return most
}

// divide returns the changes to offer now, if all together are larger than the Budget allows. The others stay dirty.
// Changes that exchange frontends stay together. Both lists are sorted as in a Delta.
//
// Three quarters of the delta are for the smallest changes, and the rest for those that have waited longest, so that
// no change waits forever.
func (c *Cursor) divide(changes []Change) (now, later []Change) {
	most := c.deltaSize()
	if most == 0 || len(changes) < 2 {
		return changes, nil
	}
	costs, total := make([]int, len(changes)), 0
	for i := range changes {
		costs[i] = changedElements(&changes[i])
		total += costs[i]
	}
	most = max(most, total/leastShare)
	if total <= most {
		return changes, nil
	}
	groups := c.groups(changes, costs)
	slices.SortFunc(groups, func(x, y group) int {
		if x.cost != y.cost {
			return x.cost - y.cost
		}
		return int(x.since) - int(y.since)
	})
	left := most
	chosen := make([]bool, len(changes))
	choose := func(g group) {
		left -= g.cost
		for _, i := range g.members {
			chosen[i] = true
		}
	}
	for len(groups) != 0 && left-groups[0].cost >= most/4 {
		choose(groups[0])
		groups = groups[1:]
	}
	slices.SortFunc(groups, func(x, y group) int { return int(x.since) - int(y.since) })
	for i, g := range groups {
		if i == 0 || g.cost <= left {
			choose(g)
		}
	}
	for i := range changes {
		if chosen[i] {
			now = append(now, changes[i])
		} else {
			later = append(later, changes[i])
		}
	}
	return now, later
}

type group struct {
	members []int // indices of the changes
	cost    int
	since   uint64 // when the first of them became dirty
}

func (c *Cursor) groups(changes []Change, costs []int) []group {
	root := make([]int, len(changes))
	for i := range root {
		root[i] = i
	}
	find := func(i int) int {
		for root[i] != i {
			root[i] = root[root[i]]
			i = root[i]
		}
		return i
	}
	var byKey map[tracker.Key]int
	for i := range changes {
		if len(changes[i].taken) == 0 {
			continue
		}
		if byKey == nil {
			byKey = make(map[tracker.Key]int, len(changes))
			for j := range changes {
				byKey[changes[j].Key] = j
			}
		}
		for _, m := range changes[i].taken {
			if j, ok := byKey[m.key]; ok {
				root[find(j)] = find(i)
			}
		}
	}
	out := make([]group, 0, len(changes))
	at := make([]int, len(changes)) // 1 + the index in out of a root's group
	for i := range changes {
		r := find(i)
		since := c.states[changes[i].ID()].since
		if at[r] == 0 {
			out = append(out, group{since: since})
			at[r] = len(out)
		}
		g := &out[at[r]-1]
		g.members = append(g.members, i)
		g.cost += costs[i]
		g.since = min(g.since, since)
	}
	return out
}

// splitTriggers moves the triggers of Services with a change in later to the end of
// c.triggers, and returns the others.
func (c *Cursor) splitTriggers(later []Change) []Trigger {
	if len(later) == 0 || len(c.triggers) == 0 {
		return c.triggers
	}
	waits := make(map[types.NamespacedName]bool, len(later))
	for i := range later {
		waits[later[i].Key.NamespacedName] = true
	}
	var now, kept []Trigger
	for _, t := range c.triggers {
		if waits[t.Service] {
			kept = append(kept, t)
		} else {
			now = append(now, t)
		}
	}
	c.triggers = append(now, kept...)
	return c.triggers[:len(now):len(now)]
}
