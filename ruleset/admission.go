package ruleset

import (
	"cmp"
	"fmt"
	"log/slog"
	"maps"
	"slices"

	"github.com/go-proxier/proxier/internal/complaint"
	"github.com/go-proxier/proxier/tracker"
)

// bound returns the version of now that the Budget allows. If the slot has no rules and none
// are allowed, bound stores the state for admit and returns nil.
func (e *Engine) bound(now *Service, s *slot, state *tracker.PortState) *Service {
	b := &e.budget
	most := b.Port
	if b.Service != 0 {
		share := max(1, b.Service/max(1, len(e.names[now.Key.NamespacedName])))
		if most == 0 || share < most {
			most = share
		}
	}
	had := 0
	if s.live {
		had = int(s.cost)
	}
	// One frontend with one endpoint must always be possible.
	least := func(frontends int) *Service {
		return withEndpoints(withFrontends(withTable(now, 0), max(1, frontends)), 1)
	}
	fitting, what := b.fit(now, most)
	if fitting == nil {
		fitting = least(1)
	}
	if b.Total != 0 && e.used-had+b.cost(fitting) > b.Total {
		left := max(b.Total-(e.used-had), had)
		if most != 0 {
			left = min(left, most)
		}
		fitting, what = nil, "all elements of the budget are in use"
		if left > 0 {
			fitting, what = b.fit(now, left)
		}
		if fitting == nil && s.live {
			fitting = least(len(s.svc.Frontends))
		}
	}
	if what != "" {
		e.overBudget(now.Key, what)
	}
	if fitting == nil {
		e.refused[now.ID] = *state
		return nil
	}
	delete(e.refused, now.ID)
	return fitting
}

// overBudget reports that a port exceeds the Budget.
func (e *Engine) overBudget(k tracker.Key, what string) {
	if e.complaints.Write(slog.LevelWarn, objectOf(k), "service exceeds its budget", "excess", what) {
		e.tracker.Event(k.NamespacedName, true, tracker.ReasonLimitExceeded,
			fmt.Sprintf("port %q (%s): %s", complaint.Value(k.Port), k.Family, complaint.Text(what)))
	}
	if e.onOverBudget != nil {
		e.onOverBudget(k)
	}
}

// charge sets the cost of a slot, 0 for one that is no longer live.
func (e *Engine) charge(s *slot, cost int) {
	if cost < int(s.cost) {
		e.freed = true
	}
	e.used += cost - int(s.cost)
	s.cost = int32(cost)
}

// sortJobs sorts the jobs by the age of their Services.
func (e *Engine) sortJobs() {
	slices.SortFunc(e.jobs, func(a, b job) int { return e.compareAge(a.id, b.id) })
	for i := range e.jobs {
		e.slots[e.jobs[i].id].job = int32(i + 1)
	}
}

// compareAge orders ports by the creation of their Services, the oldest first, and then by key.
func (e *Engine) compareAge(a, b uint32) int {
	p, o := e.slots[a].port, e.slots[b].port
	if p == nil || o == nil { // removed after it was queued
		return cmp.Compare(a, b)
	}
	return cmp.Or(p.CompareAge(o), p.Key.Compare(o.Key))
}

// admit compiles refused ports again if others have become smaller. It reports whether one
// has rules now.
func (e *Engine) admit() (changed bool) {
	if !e.freed || len(e.refused) == 0 {
		e.freed = false
		return false
	}
	e.freed = false
	ids := slices.SortedFunc(maps.Keys(e.refused), e.compareAge)
	for _, id := range ids {
		if e.used >= e.budget.Total {
			break
		}
		state := e.refused[id]
		if e.compile(job{id, &state}) {
			changed = true
		}
	}
	e.freed = false
	return changed
}

// callNotify calls the functions of Notify.
func (e *Engine) callNotify() {
	e.mu.Lock()
	notify := slices.Clone(e.notify)
	e.mu.Unlock()
	for _, f := range notify {
		(*f)()
	}
}

// serves reports whether a Service has a frontend. A Service that owns one may have to leave it
// out because of the Budget, because packets to it pass, or because a range of ports contains
// it.
func (e *Engine) serves(id uint32, at l4Key) bool {
	s := e.desired(id)
	if s == nil {
		return false
	}
	if b := &e.budget; b.Port == 0 && b.Service == 0 && b.Total == 0 && !s.Port.PassWithoutEndpoints && len(e.ownership.ranges) == 0 {
		return true
	}
	return slices.ContainsFunc(s.Frontends, func(f Frontend) bool { return l4KeyOf(s, &f) == at })
}
