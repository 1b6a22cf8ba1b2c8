package conformance

import (
	"fmt"
	"sync/atomic"
	"testing"
)

// excuses counts the TCP connections of a world and the UDP requests of its Churn,
// and those excused because of a stall: connections with a lost packet and requests
// without a reply. It is safe for concurrent use.
type excuses struct{ connections, excused atomic.Int64 }

const (
	// maxExcusedPercent is the maximum percentage of excused connections of a run, or
	// of a world outside of a run. With more, the machine is too busy to detect a
	// data plane that loses packets.
	maxExcusedPercent = 1
	// freeExcuses is the number of connections that may be excused in any case. It is
	// the number of connections that a world checks concurrently, all of which one
	// stall can hit.
	freeExcuses = concurrentChecks
)

// add adds other's counts.
func (e *excuses) add(other *excuses) {
	e.connections.Add(other.connections.Load())
	e.excused.Add(other.excused.Load())
}

func (e *excuses) String() string {
	return fmt.Sprintf("%d of %d connections had a packet lost in a stall of the machine and were excused",
		e.excused.Load(), e.connections.Load())
}

// check returns an error if too many connections were excused.
func (e *excuses) check() error {
	limit := max(freeExcuses, e.connections.Load()*maxExcusedPercent/100)
	if e.excused.Load() > limit {
		return fmt.Errorf("%s, more than %d (%d %%, at least %d): the data plane loses packets, or the machine is too busy",
			e, limit, maxExcusedPercent, freeExcuses)
	}
	return nil
}

// report logs the counts and fails the test if too many connections were excused.
func (e *excuses) report(tb testing.TB) {
	tb.Helper()
	if err := e.check(); err != nil {
		tb.Error(err)
	} else if e.connections.Load() != 0 {
		tb.Log(e)
	}
}
