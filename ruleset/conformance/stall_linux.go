package conformance

import (
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"
)

// stallDetector records stalls: periods in which a goroutine that only polls the
// clock was not run on time, because the machine stood still or was overloaded. TCP
// sends a packet again that has not been answered for a second (RFC 6298 section 2),
// whether it was lost or is still waiting for a processor.
type stallDetector struct {
	mu sync.Mutex
	// stalls is in the order of time.
	stalls []stall
	// last is when the clock was last polled.
	last time.Time
	// always reports a stall at every time, for tests of the suite.
	always bool
}

type stall struct{ from, to time.Time }

const (
	// pollInterval is the time between two polls of the clock. A poll that is late by
	// more than stallThreshold is a stall. The threshold is less than TCP's second
	// because the machine may not have stood still in all its parts for as long.
	pollInterval   = 20 * time.Millisecond
	stallThreshold = 300 * time.Millisecond
)

// newStallDetector polls the clock until the test ends.
func newStallDetector(tb testing.TB) *stallDetector {
	d := &stallDetector{last: time.Now()}
	done := make(chan struct{})
	var ended sync.WaitGroup
	ended.Go(func() {
		for {
			select {
			case <-done:
				return
			case <-time.After(pollInterval):
				d.poll(time.Now())
			}
		}
	})
	tb.Cleanup(func() {
		close(done)
		ended.Wait()
	})
	return d
}

// poll records a poll of the clock, and a stall if it is late.
func (d *stallDetector) poll(now time.Time) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if now.Sub(d.last) > pollInterval+stallThreshold {
		d.stalls = append(d.stalls, stall{d.last, now})
	}
	d.last = now
}

// stalledSince reports whether a stall ended after t or is going on.
func (d *stallDetector) stalledSince(t time.Time) bool { return d.stalledWithin(t, time.Now()) }

// stalledWithin reports whether a part of a stall was after from and before to.
func (d *stallDetector) stalledWithin(from, to time.Time) bool {
	d.poll(time.Now()) // the polling goroutine may be late itself
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.always || slices.ContainsFunc(d.stalls, func(s stall) bool { return s.to.After(from) && s.from.Before(to) })
}

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
