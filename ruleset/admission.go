package ruleset

import (
	"cmp"
	"fmt"
	"log/slog"
	"slices"

	"github.com/go-proxier/proxier/internal/complaint"
	"github.com/go-proxier/proxier/tracker"
)

// bound returns the version of the wanted Service that the Budget allows, nil if the slot has no rules and
// none are allowed. If the port would need more, it waits for admit.
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
	e.stopWaiting(now.ID)
	fitting, what := b.fit(now, most)
	if fitting == nil {
		fitting = least(1)
	}
	if a := e.narrowest(now.Key.Namespace); a != nil && b.cost(fitting)-had > a.left() {
		left := had + max(a.left(), 0)
		most = cmp.Or(most, left)
		fitting, what = nil, "no element is left"
		if left > 0 {
			fitting, what = b.fit(now, min(left, most))
		}
		if fitting == nil && s.live {
			fitting = least(len(s.svc.Frontends))
		}
		what = "beyond the budget of " + a.name + ": " + what
		e.wait(&waiter{id: now.ID, state: *state, account: a, hasRules: fitting != nil})
	}
	if what != "" {
		e.overBudget(now.Key, what)
	}
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
	by := cost - int(s.cost)
	s.cost = int32(cost)
	e.total.used += by
	if by < 0 {
		e.noteFreed(&e.total)
	}
	if e.budget.Namespace != 0 {
		a := e.namespace(s.svc.Key.Namespace)
		a.used += by
		if by < 0 {
			e.noteFreed(a)
		}
	}
}

// sortJobs sorts the jobs by the age of their Services.
func (e *Engine) sortJobs() {
	slices.SortFunc(e.jobs, func(a, b job) int {
		p, o := e.slots[a.id].port, e.slots[b.id].port
		if p == nil || o == nil { // removed after it was queued
			return cmp.Compare(a.id, b.id)
		}
		return compareAge(p, o)
	})
	for i := range e.jobs {
		e.slots[e.jobs[i].id].job = int32(i + 1)
	}
}

// compareAge orders ports by the creation of their Services, the oldest first, and then by key.
func compareAge(a, b *tracker.ServicePort) int {
	return cmp.Or(a.CompareAge(b), a.Key.Compare(b.Key))
}

// admit compiles ports that wait for elements again, if others have become smaller or have
// stopped waiting. In each account it ends at the first one that still waits. It reports whether
// the ruleset changed.
func (e *Engine) admit() (changed bool) {
	for _, a := range e.freed {
		for len(a.waiting) != 0 && a.left() > 0 {
			w := a.waiting[0]
			if e.compile(job{w.id, &w.state}) {
				changed = true
			}
			if again := e.waiting[w.id]; again != nil && again.account == a {
				break
			}
		}
	}
	for _, a := range e.freed {
		a.freed = false
	}
	e.freed = e.freed[:0]
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
	if b := &e.budget; b.Port == 0 && b.Service == 0 && b.Namespace == 0 && b.Total == 0 && !s.Port.PassWithoutEndpoints && len(e.ownership.ranges) == 0 {
		return true
	}
	return slices.ContainsFunc(s.Frontends, func(f Frontend) bool { return l4KeyOf(s, &f) == at })
}
