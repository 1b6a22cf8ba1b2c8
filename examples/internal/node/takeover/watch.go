package takeover

import "time"

// StaleAfter is how long after a change of objects the rules of a proxy that does not answer must have
// changed, too. kube-proxy syncs at least every 30 s by default. Patience is the same for a proxy that
// answers, and how long it may be without rules.
const (
	StaleAfter = 40 * time.Second
	Patience   = 5 * time.Minute
)

// slack is how much earlier than the agent another proxy may apply the same change.
const slack = 5 * time.Second

// Watch decides from successive looks at the rules of one kind whether their owner runs. The
// zero value has seen nothing. A Watch is not safe for concurrent use.
//
// An owner that answers runs. When it no longer answers in two looks in a row, it has ended: one look may
// meet a restart. An owner that never answered, because its ports are unknown or taken, runs if its rules
// appear or change between two looks, until they do not follow a change of objects. Rules that exist at
// the first look and whose owner does not answer are left: an owner that runs restores them.
type Watch struct {
	looked, answered bool
	misses           int
	stamp            uint64
	now              time.Time
	// changed is when the rules were last seen to change, and behind since when they are missing or do
	// not follow the objects. Both may be zero.
	changed, behind time.Time
}

// Look notes a look at the time now: the stamp of the rules, 0 if there are none, whether their owner
// answers, and when objects last changed, or zero.
func (w *Watch) Look(now time.Time, stamp uint64, answers bool, objects time.Time) {
	if w.looked && stamp != 0 && stamp != w.stamp || answers && !w.answered {
		w.changed, w.behind = now, time.Time{}
	}
	switch {
	case !w.behind.IsZero():
	case stamp == 0:
		w.behind = now
	case objects.After(w.changed.Add(slack)):
		w.behind = objects
	}
	w.looked, w.stamp, w.now = true, stamp, now
	if w.misses++; answers {
		w.answered, w.misses = true, 0
	} else if w.answered && w.misses == 2 {
		w.answered, w.changed = false, time.Time{}
	}
}

// Answers reports whether the owner of the rules answers, or did at the last look but one.
func (w *Watch) Answers() bool { return w.answered }

// Runs reports whether the owner of the rules runs.
func (w *Watch) Runs() bool {
	return w.answered || w.stamp != 0 && !w.changed.IsZero() && !w.late(StaleAfter)
}

// State returns "in-use" for rules whose owner runs, "left" for rules whose owner has ended, or "" without rules.
func (w *Watch) State() string {
	switch {
	case w.stamp == 0:
		return ""
	case w.Runs():
		return "in-use"
	}
	return "left"
}

// Idle reports that the owner has written no rules for [Patience], or none that follow the objects.
func (w *Watch) Idle() bool { return w.late(Patience) }

func (w *Watch) late(limit time.Duration) bool {
	return !w.behind.IsZero() && w.now.Sub(w.behind) >= limit
}
