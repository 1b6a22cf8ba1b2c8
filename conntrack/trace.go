package conntrack

import (
	"errors"
	"time"

	"github.com/go-proxier/proxier/tracker"
)

// Trace is a set of functions that are told what a [Cleaner] does. Any of them,
// and the *Trace itself, may be nil. They are called by the goroutine that
// flushes, and must not call the Cleaner.
type Trace struct {
	// Flushed is called after each clean-up that had anything to do.
	Flushed func(Info)
	// FlushedFamily is called before it for each family that something was done in,
	// with what was done there.
	FlushedFamily func(tracker.Family, Info)
}

// Info is what one clean-up did.
type Info struct {
	// Dumps is how many times the table was read: once for each family with
	// something to do.
	Dumps int
	// Seen is how many flows were looked at.
	Seen int
	// Stale is how many of them were stale and not spared by [Config.Filter], and
	// Deleted how many of those were still there to be deleted.
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

func (t *Trace) flushedFamily(f tracker.Family, i Info) {
	if t != nil && t.FlushedFamily != nil {
		t.FlushedFamily(f, i)
	}
}

// add counts what was done in one family.
func (i *Info) add(o Info) {
	i.Dumps += o.Dumps
	i.Seen += o.Seen
	i.Stale += o.Stale
	i.Deleted += o.Deleted
	i.Err = errors.Join(i.Err, o.Err)
}
