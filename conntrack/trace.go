package conntrack

import "time"

// Trace is a set of functions that are told what a [Cleaner] does. Any of them,
// and the *Trace itself, may be nil. They are called by the goroutine that
// flushes, and must not call the Cleaner.
type Trace struct {
	// Flushed is called after each clean-up that had anything to do.
	Flushed func(Info)
}

// Info is what one clean-up did.
type Info struct {
	// Dumps is how many times the table was read: once for each family with
	// something to do.
	Dumps int
	// Seen is how many flows were looked at.
	Seen int
	// Stale is how many of them were stale, and Deleted how many of those were still
	// there to be deleted.
	Stale, Deleted int
	// Duration is how long it took.
	Duration time.Duration
	// Err is why it has to be done again, or nil.
	Err error
}

func (t *Trace) flushed(i Info) {
	if t != nil && t.Flushed != nil {
		t.Flushed(i)
	}
}
