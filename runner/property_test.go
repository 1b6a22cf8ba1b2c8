package runner_test

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"testing"
	"testing/synctest"
	"time"

	"github.com/go-proxier/proxier/runner"
)

// outcome is the result of one run.
type outcome uint8

const (
	ok outcome = iota
	fails
	panics
)

// TestRunsStartWhenDue runs random scripts. It checks every start against the rules
// of the package documentation, recomputed from the events.
func TestRunsStartWhenDue(t *testing.T) {
	for seed := range uint64(400) {
		t.Run(fmt.Sprint("seed=", seed), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) { spacing(t, rand.New(rand.NewPCG(seed, 1))) })
		})
	}
}

func spacing(t *testing.T, rng *rand.Rand) {
	const ms = time.Millisecond
	// Small numbers, so that events often coincide.
	minGap := time.Duration(rng.IntN(6)) * ms
	retry := time.Duration(1+rng.IntN(12)) * ms
	maxGap := minGap + time.Duration(1+rng.IntN(40))*ms
	var pace runner.Pace
	if rng.IntN(2) == 0 {
		pace = runner.Pace{Factor: float64(1+rng.IntN(8)) / 2, Most: minGap + time.Duration(rng.Int64N(int64(maxGap-minGap)+1))}
		if rng.IntN(2) == 0 {
			pace.Burst = time.Duration(rng.Int64N(int64(pace.Most) + 1))
		}
	}
	begin := time.Now()
	end := begin.Add(500*ms + 1000)

	// No two triggers and no trigger and timer have the same time: each trigger is by its
	// number of nanoseconds later than a multiple of half a millisecond.
	var triggers []time.Time
	for at, n := begin, rng.IntN(120); n > 0; n-- {
		if rng.IntN(3) > 0 {
			at = at.Add(time.Duration(rng.IntN(20)) * ms)
		}
		if next := at.Add(time.Duration(len(triggers) + 1)); next.Before(end) {
			triggers = append(triggers, next)
		}
	}

	var runs []runner.RunInfo
	resyncs := 0
	ctx, cancel := context.WithDeadline(t.Context(), end)
	defer cancel()
	r, err := runner.New(runner.Config{
		Min: minGap, Pace: pace, Retry: retry, Max: maxGap,
		Resync: func() { resyncs++ },
		Hooks:  &runner.Hooks{SyncDone: func(i runner.RunInfo) { runs = append(runs, i) }},
	}, func(context.Context) error {
		time.Sleep(time.Duration(rng.IntN(8)) * ms)
		switch outcome(rng.IntN(4)) {
		case fails:
			return errors.New("no")
		case panics:
			panic("oh")
		default:
			return nil
		}
	})
	if err != nil {
		t.Fatal(err)
	}
	go func() {
		for _, at := range triggers {
			time.Sleep(time.Until(at))
			r.Trigger()
		}
	}()
	if err := r.Run(ctx); !errors.Is(err, context.DeadlineExceeded) {
		t.Fatalf("Run returned %v", err)
	}

	// The model. Times are since begin.
	since := func(at time.Time) time.Duration { return at.Sub(begin) }
	const never = time.Hour
	var (
		pauseEnds  time.Duration // after the last run
		retryDue   = never
		periodic   = maxGap
		taken      = 0 // triggers that runs have served
		wantResync = 0
	)
	for i, run := range runs {
		due := min(retryDue, periodic)
		if taken < len(triggers) {
			due = min(due, since(triggers[taken]))
		}
		want := max(due, pauseEnds)
		start, end := since(run.Start), since(run.Start)+run.Duration
		if start != want {
			t.Fatalf("run %d started at %v, want %v (Min %v, Pace %+v, Retry %v, Max %v)", i, start, want, minGap, pace, retry, maxGap)
		}
		queued, count := time.Time{}, 0
		for ; taken < len(triggers) && since(triggers[taken]) <= start; taken++ {
			if count == 0 {
				queued = triggers[taken]
			}
			count++
		}
		if run.Triggers != count || !run.QueuedAt.Equal(queued) {
			t.Fatalf("run %d: %d triggers, first %v, want %d, %v", i, run.Triggers, run.QueuedAt, count, queued)
		}
		reason := runner.Retry
		if count > 0 {
			reason = runner.Triggered
		}
		if periodic <= start {
			reason = runner.Periodic
			wantResync++
		}
		if run.Reason() != reason {
			t.Fatalf("run %d: %v, want %v", i, run.Reason(), reason)
		}
		pauseEnds, retryDue = end+minGap, never
		if pace.Factor != 0 {
			least := minGap
			if count > 1 {
				least = max(least, pace.Burst)
			}
			pauseEnds = end + min(max(least, time.Duration(pace.Factor*float64(run.Duration))), pace.Most)
		}
		if run.Err != nil {
			retryDue = end + retry
		}
		if reason == runner.Periodic {
			periodic = end + maxGap
			if run.Err != nil {
				periodic = retryDue
			}
		}
	}
	if resyncs != wantResync {
		t.Fatalf("%d resyncs, want %d", resyncs, wantResync)
	}
	// No run may be due at the end of the script.
	last := pauseEnds
	if last < since(end) {
		due := min(retryDue, periodic)
		if taken < len(triggers) {
			due = min(due, since(triggers[taken]))
		}
		if max(due, pauseEnds) < since(end) {
			t.Fatalf("nothing ran at %v", max(due, pauseEnds))
		}
	}
}
