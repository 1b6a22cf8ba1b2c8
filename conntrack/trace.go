package conntrack

import (
	"errors"
	"time"

	"github.com/go-proxier/proxier/tracker"
)

// Trace is a set of hooks that a [Cleaner] calls. Any hook, and the *Trace itself, may be
// nil. The goroutine that flushes calls the hooks, which must not call the Cleaner.
type Trace struct {
	// Flushed is called after each clean-up that examined any family.
	Flushed func(Info)
	// FlushedFamily is called for each examined family, before Flushed.
	FlushedFamily func(tracker.Family, Info)
}

// Info describes one clean-up.
type Info struct {
	// Dumps is the number of dumps of the table, one for each examined family.
	Dumps int
	// Seen is the number of flows in the dumps.
	Seen int
	// Stale is the number of stale flows that [Config.Filter] did not spare. Deleted is
	// the number of deleted flows. Some stale flows may have ended by themselves.
	Stale, Deleted int
	// Duration is how long the clean-up took.
	Duration time.Duration
	// Err is the error after which the next Flush repeats the clean-up, or nil.
	Err error
}

func (t *Trace) flushed(i Info) {
	if t != nil && t.Flushed != nil {
		t.Flushed(i)
	}
}

func (t *Trace) flushedFamily(f tracker.Family, i Info) {
	if t != nil && t.FlushedFamily != nil {
		t.FlushedFamily(f, i)
	}
}

// add adds the counts and the error of one family.
func (i *Info) add(o Info) {
	i.Dumps += o.Dumps
	i.Seen += o.Seen
	i.Stale += o.Stale
	i.Deleted += o.Deleted
	i.Err = errors.Join(i.Err, o.Err)
}
