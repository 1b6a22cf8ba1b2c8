package conformance

import (
	"slices"
	"sync"
	"testing"
	"time"
)

// pulse tells when the machine stood still, or was so busy that a goroutine that had
// nothing to do but to look at the time came to it late. TCP repeats a packet that has
// had no answer for a second (RFC 6298 section 2), be it lost or not yet looked at by
// anybody.
type pulse struct {
	mu sync.Mutex
	// stops is when it was, the latest last.
	stops []stop
	// last is the last beat.
	last time.Time
}

type stop struct{ from, to time.Time }

const (
	// beat is the time between two looks, and late how much more of it is worth noting:
	// some of TCP's second, since not all of the machine may have stood still as long.
	beat = 20 * time.Millisecond
	late = 300 * time.Millisecond
)

// newPulse begins to look at the time, until the test ends.
func newPulse(tb testing.TB) *pulse {
	p := &pulse{last: time.Now()}
	done := make(chan struct{})
	var ended sync.WaitGroup
	ended.Go(func() {
		for {
			select {
			case <-done:
				return
			case <-time.After(beat):
				p.look(time.Now())
			}
		}
	})
	tb.Cleanup(func() {
		close(done)
		ended.Wait()
	})
	return p
}

// look notes that it is now, and whether that is late.
func (p *pulse) look(now time.Time) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if now.Sub(p.last) > beat+late {
		p.stops = append(p.stops, stop{p.last, now})
	}
	p.last = now
}

// stopped reports whether the machine has stood still at some time since then.
func (p *pulse) stopped(since time.Time) bool {
	p.look(time.Now()) // it may not have come to it yet
	p.mu.Lock()
	defer p.mu.Unlock()
	return slices.ContainsFunc(p.stops, func(s stop) bool { return s.to.After(since) })
}
