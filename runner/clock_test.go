package runner_test

import (
	"context"
	"errors"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/go-proxier/proxier/internal/testing/must"
	"github.com/go-proxier/proxier/internal/testing/usage"
	"github.com/go-proxier/proxier/runner"
)

// TestMissedRunsHappenOnce runs for a day. Runs that became due must happen once, and the
// intervals must continue.
func TestMissedRunsHappenOnce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		during := false
		s := tell(t, runner.Config{Min: time.Second, Retry: 5 * time.Second, Max: time.Hour}, func(context.Context) error {
			if during {
				during = false
				time.Sleep(24 * time.Hour)
			}
			return nil
		})
		during = true
		s.Trigger()
		time.Sleep(24*time.Hour + 2*time.Second)
		expect(t, "after a day", s.reasons(), runner.Triggered, runner.Periodic)
		s.Trigger()
		time.Sleep(2 * time.Second)
		expect(t, "and then", s.reasons(), runner.Triggered, runner.Periodic, runner.Triggered)
		time.Sleep(time.Hour)
		expect(t, "an hour later", s.reasons(), runner.Triggered, runner.Periodic, runner.Triggered, runner.Periodic)
		if err := s.stop(); !errors.Is(err, context.Canceled) {
			t.Error(err)
		}
	})
}

// TestWallClockDoesNotMatter checks that the times from the system clock have a
// monotonic reading, so that setting the date has no effect.
func TestWallClockDoesNotMatter(t *testing.T) {
	done := make(chan runner.RunInfo, 1)
	r := must.Get(runner.New(runner.Config{Hooks: &runner.Hooks{SyncDone: func(i runner.RunInfo) { done <- i }}}, succeed))(t)
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
			r := must.Get(runner.New(runner.Config{Min: time.Hour, Max: 2 * time.Hour}, succeed))(t)
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
