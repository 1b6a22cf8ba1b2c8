package takeover

import "time"

// StaleAfter is how long after a change of the agent's own rules another proxy's rules must
// have changed, too. kube-proxy syncs at least every 30 s by default.
const StaleAfter = 40 * time.Second

// slack is how much earlier than the agent another proxy may apply the same change.
const slack = 5 * time.Second

// missesToEnd is in how many successive looks an owner that answered before must not answer
// to count as gone. One look may meet a restart.
const missesToEnd = 2

// State is the state of the rules of one kind.
type State string

// The states.
const (
	// Absent means that there are no rules.
	Absent State = "absent"
	// InUse means that the owner of the rules runs.
	InUse State = "in-use"
	// Left means that the owner of the rules has ended.
	Left State = "left"
)

// Sighting is what one look found about one kind of rules.
type Sighting struct {
	// Present reports that there are rules. Stamp changes with them.
	Present bool
	Stamp   uint64
	// Answers reports that a process that owns such rules answers, or that [Prober] found it.
	Answers bool
	// OwnChange is when the agent last changed its own rules because objects changed, or
	// zero.
	OwnChange time.Time
}

// Watch decides from successive sightings of one kind whether the owner of the rules runs. The
// zero value has seen nothing. A Watch is not safe for concurrent use.
//
// An owner that answers runs. When it no longer answers, it has ended. An owner that never
// answered, because its ports are unknown or taken, runs if its rules appeared or changed
// between two looks. It has ended if its rules then do not follow a change that the agent
// applied. Rules that exist at the first look and whose owner does not answer count as left:
// if their owner runs all the same, it restores them, and then they have appeared.
type Watch struct {
	looked, present bool
	stamp           uint64
	// changed is when the rules were last seen to change, and behind is the first change of
	// the agent's own rules that they have not followed. Both may be zero.
	changed, behind time.Time
	// answered reports that the owner answers, or did misses looks ago.
	answered bool
	misses   int
}

// Look returns the state at the time now.
func (w *Watch) Look(now time.Time, s Sighting) State {
	if w.looked && s.Present && (!w.present || s.Stamp != w.stamp) {
		w.changed, w.behind = now, time.Time{}
	}
	w.looked, w.present, w.stamp = true, s.Present, s.Stamp
	switch {
	case s.Answers:
		w.answered, w.misses = true, 0
	case w.answered:
		if w.misses++; w.misses == missesToEnd {
			w.answered, w.misses = false, 0
			w.changed, w.behind = time.Time{}, time.Time{}
		}
	}
	switch {
	case !s.Present:
		w.changed, w.behind = time.Time{}, time.Time{}
		return Absent
	case w.answered:
		return InUse
	case w.changed.IsZero():
		return Left
	}
	if w.behind.IsZero() && s.OwnChange.After(w.changed.Add(slack)) {
		w.behind = s.OwnChange
	}
	if !w.behind.IsZero() && now.Sub(w.behind) >= StaleAfter {
		return Left
	}
	return InUse
}

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
