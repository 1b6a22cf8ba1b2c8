// Package stall detects periods in which the machine stood still. Tests that send packets
// use it to ignore retransmissions that the data plane did not cause: TCP sends a packet
// again that has not been answered for a second (RFC 6298 section 2), whether it was lost or
// still waits for a processor. Tests of how long something takes subtract the stalls.
package stall

import (
	"slices"
	"sync"
	"time"
)

// Detector records stalls: periods in which a goroutine that only polls the clock was
// not run on time, because the machine or one of its processors stood still or was
// overloaded. On machines with few processors there is one such goroutine for each, since
// a host may take away one processor of a virtual machine while the others run. Its
// methods may be called by several goroutines at the same time.
type Detector struct {
	// Always makes Since and Within report true, for tests. It must not change while the
	// Detector is in use.
	Always bool

	mu sync.Mutex
	// stalls holds disjoint periods.
	stalls []period
	// last holds when each goroutine last polled the clock.
	last []time.Time
	done chan struct{}
	wg   sync.WaitGroup
}

type period struct{ from, to time.Time }

const (
	// pollInterval is the time between two polls of the clock. A poll that is late by
	// more than threshold is a stall. The threshold is less than TCP's second because
	// other parts of the machine may have stood still for longer.
	pollInterval = 20 * time.Millisecond
	threshold    = 300 * time.Millisecond
)

// Start returns a Detector that polls the clock until it is stopped.
func Start() *Detector {
	pins := processors()
	d := &Detector{last: slices.Repeat([]time.Time{time.Now()}, len(pins)), done: make(chan struct{})}
	for i, pin := range pins {
		d.wg.Go(func() {
			pin()
			for {
				select {
				case <-d.done:
					return
				case <-time.After(pollInterval):
					d.poll(i, time.Now())
				}
			}
		})
	}
	return d
}

// Stop ends the polling. It must be called once.
func (d *Detector) Stop() {
	close(d.done)
	d.wg.Wait()
}

// poll records a poll of the clock by goroutine i, and a stall if it is late.
func (d *Detector) poll(i int, now time.Time) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if late := (period{d.last[i], now}); late.to.Sub(late.from) > pollInterval+threshold {
		// Another processor may have stood still at the same time.
		d.stalls = slices.DeleteFunc(d.stalls, func(s period) bool {
			overlap := s.to.After(late.from) && s.from.Before(late.to)
			if overlap && s.from.Before(late.from) {
				late.from = s.from
			}
			return overlap
		})
		d.stalls = append(d.stalls, late)
	}
	d.last[i] = now
}

// Since reports whether a stall ended after t or is going on.
func (d *Detector) Since(t time.Time) bool { return d.Within(t, time.Now()) }

// Within reports whether a part of a stall was after from and before to.
func (d *Detector) Within(from, to time.Time) bool {
	for i := range d.last {
		d.poll(i, time.Now()) // the polling goroutine may be late itself
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.Always || slices.ContainsFunc(d.stalls, func(s period) bool { return s.to.After(from) && s.from.Before(to) })
}

// Running returns the time between from and to without the stalls.
func (d *Detector) Running(from, to time.Time) time.Duration {
	for i := range d.last {
		d.poll(i, time.Now())
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	running := to.Sub(from)
	for _, s := range d.stalls {
		running -= max(0, earlier(s.to, to).Sub(later(s.from, from)))
	}
	return running
}

func earlier(a, b time.Time) time.Time {
	if a.Before(b) {
		return a
	}
	return b
}

func later(a, b time.Time) time.Time {
	if a.After(b) {
		return a
	}
	return b
}

// Stalls returns how many stalls there were, and how long they were in all.
func (d *Detector) Stalls() (n int, total time.Duration) {
	d.mu.Lock()
	defer d.mu.Unlock()
	for _, s := range d.stalls {
		total += s.to.Sub(s.from)
	}
	return len(d.stalls), total
}
