package runner_test

import (
	"context"
	"errors"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/go-proxier/proxier/internal/usage"
	"github.com/go-proxier/proxier/runner"
)

// leaping is a clock that can be set forward, like a clock that counts the time a
// machine sleeps.
type leaping struct {
	mu     sync.Mutex
	on     time.Duration
	timers map[*leapTimer]bool
}

type leapTimer struct {
	clock *leaping
	*time.Timer
	at time.Time
	c  chan time.Time
}

func (c *leaping) Now() time.Time {
	c.mu.Lock()
	defer c.mu.Unlock()
	return time.Now().Add(c.on)
}

func (c *leaping) NewTimer(d time.Duration) runner.Timer {
	t := &leapTimer{clock: c, at: c.Now().Add(d), c: make(chan time.Time, 1)}
	c.mu.Lock()
	defer c.mu.Unlock()
	t.Timer = time.AfterFunc(d, t.fire)
	c.timers[t] = true
	return t
}

func (t *leapTimer) fire() {
	t.clock.mu.Lock()
	defer t.clock.mu.Unlock()
	if t.clock.timers[t] {
		delete(t.clock.timers, t)
		t.c <- t.at
	}
}

func (t *leapTimer) C() <-chan time.Time { return t.c }

func (t *leapTimer) Stop() {
	t.clock.mu.Lock()
	defer t.clock.mu.Unlock()
	t.Timer.Stop()
	delete(t.clock.timers, t)
}

// leap sets the clock forward and fires the timers that are then due.
func (c *leaping) leap(d time.Duration) {
	c.mu.Lock()
	c.on += d
	var due []*leapTimer
	for t := range c.timers {
		if !t.at.After(time.Now().Add(c.on)) {
			due = append(due, t)
		}
	}
	c.mu.Unlock()
	for _, t := range due {
		t.fire()
	}
}

// TestMissedRunsHappenOnce sets the clock forward by a day between runs and during a
// run. Runs that became due must happen once, and the intervals must continue.
func TestMissedRunsHappenOnce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		clock := &leaping{timers: map[*leapTimer]bool{}}
		during := false
		s := tell(t, runner.Config{Min: time.Second, Retry: 5 * time.Second, Max: time.Hour, Clock: clock}, func(context.Context) error {
			if during {
				during = false
				clock.leap(24 * time.Hour)
			}
			return nil
		})
		expect(t, "at first", s.reasons())
		clock.leap(24 * time.Hour)
		expect(t, "after a leap", s.reasons(), runner.Periodic)
		time.Sleep(time.Hour - time.Second)
		expect(t, "an hour later, all but a second", s.reasons(), runner.Periodic)
		time.Sleep(2 * time.Second)
		expect(t, "an hour later", s.reasons(), runner.Periodic, runner.Periodic)

		during = true
		s.Trigger()
		time.Sleep(2 * time.Second)
		// The periodic run that became due during this run follows.
		expect(t, "with a leap in it", s.reasons(), runner.Periodic, runner.Periodic, runner.Triggered, runner.Periodic)
		s.Trigger()
		time.Sleep(2 * time.Second)
		expect(t, "and then", s.reasons(), runner.Periodic, runner.Periodic, runner.Triggered, runner.Periodic, runner.Triggered)
		if err := s.stop(); !errors.Is(err, context.Canceled) {
			t.Error(err)
		}
	})
}

// TestWallClockDoesNotMatter checks that the times from the system clock have a
// monotonic reading, so that setting the date has no effect.
func TestWallClockDoesNotMatter(t *testing.T) {
	done := make(chan runner.Info, 1)
	r, err := runner.New(runner.Config{Trace: &runner.Trace{SyncDone: func(i runner.Info) { done <- i }}}, succeed)
	if err != nil {
		t.Fatal(err)
	}
	ctx, stop := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() { ended <- r.Run(ctx) }()
	r.Trigger()
	i := <-done
	for _, at := range []time.Time{i.Start, i.QueuedAt} {
		if !strings.Contains(at.String(), " m=+") {
			t.Errorf("%v has no monotonic reading", at)
		}
	}
	stop()
	<-ended
}

// TestStoppedRunnersAreFreed runs and stops thousands of runners.
func TestStoppedRunnersAreFreed(t *testing.T) {
	round := func(n int) {
		for range n {
			r, err := runner.New(runner.Config{Min: time.Hour, Max: 2 * time.Hour}, succeed)
			if err != nil {
				t.Fatal(err)
			}
			ctx, stop := context.WithCancel(t.Context())
			ended := make(chan error, 1)
			go func() { ended <- r.Run(ctx) }()
			r.Trigger()
			stop()
			<-ended
		}
	}
	round(2000)
	before := usage.Now()
	round(2000)
	before.Keep(t, 100<<10)
}
