package conformance

import (
	"fmt"
	"sync/atomic"
	"testing"
)

// excuses counts the TCP connections of a world and the UDP requests of its Churn, and those
// of them that are excused because of a stall: connections in which a packet was
// retransmitted, and requests without an answer. It may be used by several goroutines at
// once.
type excuses struct{ connections, excused atomic.Int64 }

const (
	// maxExcusedPercent is how many percent of the connections of a run, or of a world
	// outside of a run, may be excused: beyond that the machine is too busy to tell a
	// data plane that loses packets from one that does not.
	maxExcusedPercent = 1
	// freeExcuses may be excused however few the connections are. It is the number of
	// connections that a world checks at a time, all of which one stall can hit.
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
