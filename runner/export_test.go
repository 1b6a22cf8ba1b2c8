package runner

// Reason is the reason for a run, which only the log shows.
type Reason = reason

const (
	Retry     = retry
	Triggered = triggered
	Periodic  = periodic
)

// Reason returns the reason for the run.
func (i RunInfo) Reason() Reason { return i.reason }
