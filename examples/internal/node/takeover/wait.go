package takeover

import "time"

// Patience is for how long a proxy that answers may leave its rules behind the objects.
const Patience = 5 * time.Minute

// Wait decides whether an agent still waits for a proxy that answers and whose rules have the same
// names as its own. A process that answers and writes nothing must not keep the node without
// rules. The zero value has seen nothing. A Wait is not safe for concurrent use.
type Wait struct {
	looked bool
	rules  Rules
	// proved is when the rules were last seen to change, or the first look. behind is the
	// first change of objects that they have not followed, or zero.
	proved, behind time.Time
}

// Over reports whether the wait is over at the time now: there have been no rules for Patience, or
// they have not changed for Patience after objects had. While no object changes, rules that exist
// are right. objects is when objects last changed, or zero.
func (w *Wait) Over(now time.Time, r Rules, objects time.Time) bool {
	if !w.looked || r.Present && r != w.rules {
		w.proved, w.behind = now, time.Time{}
	}
	w.looked, w.rules = true, r
	if !r.Present {
		return now.Sub(w.proved) >= Patience
	}
	if w.behind.IsZero() && objects.After(w.proved.Add(slack)) {
		w.behind = objects
	}
	return !w.behind.IsZero() && now.Sub(w.behind) >= Patience
}
