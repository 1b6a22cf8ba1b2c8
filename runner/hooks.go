package runner

import (
	"slices"
	"time"
)

// Hooks holds functions that a [Runner] calls, for metrics and health checks. Each of them, and the *Hooks itself,
// may be nil. They must return quickly and must not call [Runner.Run].
type Hooks struct {
	// Queued is called with the time when a trigger requests a run and none is requested yet, by the goroutine that
	// triggers, before the SyncStart of that run. Queued must not call Trigger.
	Queued func(at time.Time)
	// SyncStart is called before each run, without Err and Duration. The goroutine in Run calls SyncStart and
	// SyncDone.
	SyncStart func(RunInfo)
	// SyncDone is called after each run.
	SyncDone func(RunInfo)
}

// RunInfo describes one run.
type RunInfo struct {
	// Triggers is the number of calls of [Runner.Trigger] that the run serves.
	Triggers int
	// QueuedAt is the time of the oldest of these calls, or the zero Time if there
	// are none.
	QueuedAt time.Time
	// Start is the time at which the run started.
	Start time.Time
	// Duration is the duration of the run.
	Duration time.Duration
	// Err is the error of the function, or a [*PanicError]. It is not a failure if [IsNotReady].
	Err error

	reason reason
}

// reason is the reason for a run. If several apply, it is the last of them in the order
// of the constants.
type reason string

const (
	retry     reason = "retry"     // the previous run failed
	triggered reason = "triggered" // Trigger was called
	periodic  reason = "periodic"  // Config.Max has passed
)

// call calls a function of Hooks, if it is set.
func call[T any](f func(T), x T) {
	if f != nil {
		f(x)
	}
}

// Join returns Hooks that call the functions of each of hs in their order. A nil one has no functions.
func Join(hs ...*Hooks) *Hooks {
	hs = slices.DeleteFunc(slices.Clone(hs), func(h *Hooks) bool { return h == nil })
	return &Hooks{
		Queued: func(at time.Time) {
			for _, h := range hs {
				call(h.Queued, at)
			}
		},
		SyncStart: func(i RunInfo) {
			for _, h := range hs {
				call(h.SyncStart, i)
			}
		},
		SyncDone: func(i RunInfo) {
			for _, h := range hs {
				call(h.SyncDone, i)
			}
		},
	}
}
