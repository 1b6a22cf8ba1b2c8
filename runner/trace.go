package runner

import "time"

// Trace is a set of functions that are told what a [Runner] does, for metrics
// and health checks. Any of them, and the *Trace itself, may be nil. They must
// return soon, and must not call the Runner's Run.
type Trace struct {
	// Queued is called when a trigger asks for a run and none was asked for
	// already, with the time. Until SyncStart there is something to do that is not
	// being done. It is called by the goroutine that triggers, before the SyncStart
	// of the run this leads to, and must not call Trigger.
	Queued func(at time.Time)
	// SyncStart is called before each run, with Err and Duration unset. It and
	// SyncDone are called by the goroutine that called Run.
	SyncStart func(Info)
	// SyncDone is called after each run.
	SyncDone func(Info)
}

// Info is what is known of one run.
type Info struct {
	// Reason is why the run happens.
	Reason Reason
	// Triggers is how many calls of [Runner.Trigger] the run answers, 0 for none.
	Triggers int
	// QueuedAt is when the oldest of them was made, the zero Time for none.
	QueuedAt time.Time
	// Start is when the run started.
	Start time.Time
	// Duration is how long it took.
	Duration time.Duration
	// Err is what the function returned, or a [*PanicError].
	Err error
}

// Reason is why a run happens. Where several apply it is the last in order.
type Reason uint8

const (
	// Retry: the run before failed.
	Retry Reason = iota + 1
	// Triggered: [Runner.Trigger] was called.
	Triggered
	// Periodic: [Config.Max] has passed.
	Periodic
)

// String returns "retry", "triggered" or "periodic".
func (r Reason) String() string {
	switch r {
	case Retry:
		return "retry"
	case Triggered:
		return "triggered"
	case Periodic:
		return "periodic"
	}
	return "unknown reason"
}

func (t *Trace) queued(at time.Time) {
	if t != nil && t.Queued != nil {
		t.Queued(at)
	}
}

func (t *Trace) syncStart(i Info) {
	if t != nil && t.SyncStart != nil {
		t.SyncStart(i)
	}
}

func (t *Trace) syncDone(i Info) {
	if t != nil && t.SyncDone != nil {
		t.SyncDone(i)
	}
}
