package runner_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math"
	"runtime"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/go-proxier/proxier/internal/testing/must"
	"github.com/go-proxier/proxier/runner"
)

func TestInvalidIntervalsAreRejected(t *testing.T) {
	fn := func(context.Context) error { return nil }
	for name, c := range map[string]struct {
		cfg runner.Config
		fn  func(context.Context) error
	}{
		"no function":          {runner.Config{}, nil},
		"negative Min":         {runner.Config{Min: -1}, fn},
		"negative Retry":       {runner.Config{Retry: -1}, fn},
		"negative Max":         {runner.Config{Max: -1}, fn},
		"Max less than Min":    {runner.Config{Min: 2, Max: 1}, fn},
		"negative Factor":      {runner.Config{Pace: runner.Pace{Factor: -1, Most: 1}}, fn},
		"no Factor at all":     {runner.Config{Pace: runner.Pace{Factor: math.NaN(), Most: 1}}, fn},
		"Most less than Min":   {runner.Config{Min: 2, Pace: runner.Pace{Factor: 1, Most: 1}}, fn},
		"negative Burst":       {runner.Config{Pace: runner.Pace{Factor: 1, Most: 1, Burst: -1}}, fn},
		"Burst alone":          {runner.Config{Pace: runner.Pace{Most: 1, Burst: 1}}, fn},
		"Most less than Burst": {runner.Config{Pace: runner.Pace{Factor: 1, Most: 1, Burst: 2}}, fn},
		"Max less than Most":   {runner.Config{Max: 2, Pace: runner.Pace{Factor: 1, Most: 3}}, fn},
	} {
		if r, err := runner.New(c.cfg, c.fn); err == nil || r != nil {
			t.Errorf("%s: %v, %v", name, r, err)
		}
	}
	if _, err := runner.New(runner.Config{}, fn); err != nil {
		t.Errorf("the zero Config: %v", err)
	}
}

// story runs a Runner in a synctest bubble and records the time of each start since
// the beginning.
type story struct {
	*runner.Runner
	begin time.Time
	stop  func() error

	mu   sync.Mutex
	done []runner.RunInfo
}

// runs returns the runs so far.
func (s *story) runs() []runner.RunInfo {
	synctest.Wait()
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.Clone(s.done)
}

func tell(t *testing.T, cfg runner.Config, fn func(context.Context) error, before ...func(*runner.Runner)) *story {
	t.Helper()
	s := &story{begin: time.Now()}
	cfg.Hooks = &runner.Hooks{SyncDone: func(i runner.RunInfo) {
		s.mu.Lock()
		defer s.mu.Unlock()
		s.done = append(s.done, i)
	}}
	r := must.Get(runner.New(cfg, fn))(t)
	s.Runner = r
	for _, f := range before {
		f(r)
	}
	ctx, cancel := context.WithCancel(t.Context())
	result := make(chan error, 1)
	go func() { result <- r.Run(ctx) }()
	s.stop = func() error { cancel(); return <-result }
	synctest.Wait()
	return s
}

func (s *story) starts() []time.Duration {
	var out []time.Duration
	for _, r := range s.runs() {
		out = append(out, r.Start.Sub(s.begin))
	}
	return out
}

func (s *story) reasons() []runner.Reason {
	var out []runner.Reason
	for _, r := range s.runs() {
		out = append(out, r.Reason())
	}
	return out
}

func expect[T comparable](t *testing.T, what string, got []T, want ...T) {
	t.Helper()
	if !slices.Equal(got, want) {
		t.Errorf("%s: %v, want %v", what, got, want)
	}
}

func succeed(context.Context) error { return nil }

func TestTriggerBeforeRunIsKept(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := tell(t, runner.Config{Min: time.Minute}, succeed,
			(*runner.Runner).Trigger, (*runner.Runner).Trigger)
		expect(t, "starts", s.starts(), 0)
		if n := s.runs()[0].Triggers; n != 2 {
			t.Errorf("%d triggers, want 2", n)
		}
		if err := s.stop(); !errors.Is(err, context.Canceled) {
			t.Error(err)
		}
	})
}

func TestNothingRunsUntriggered(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := tell(t, runner.Config{}, succeed)
		time.Sleep(1000 * time.Hour)
		expect(t, "starts", s.starts())
		s.stop()
	})
}

func TestFailedPeriodicIsRetriedAsPeriodic(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		left := 2
		s := tell(t, runner.Config{Retry: time.Second, Max: time.Minute, Resync: func() {
			if left--; left >= 0 {
				panic("a panic here is a failed run too")
			}
		}}, succeed)
		time.Sleep(2 * time.Minute)
		expect(t, "starts", s.starts(), 60e9, 61e9, 62e9)
		expect(t, "reasons", s.reasons(), runner.Periodic, runner.Periodic, runner.Periodic)
		s.stop()
	})
}

func TestPanicCountsAsFailure(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var log bytes.Buffer
		cause := errors.New("a cause")
		what := []any{"oops", cause, nil}
		s := tell(t, runner.Config{
			Min: time.Second, Retry: 5 * time.Second, Max: time.Hour,
			Log: slog.New(slog.NewTextHandler(&log, nil)),
		}, func(context.Context) error {
			if len(what) > 0 {
				v := what[0]
				what = what[1:]
				panic(v)
			}
			return nil
		}, (*runner.Runner).Trigger)
		time.Sleep(time.Minute)
		expect(t, "starts", s.starts(), 0, 5*time.Second, 10*time.Second, 15*time.Second)

		var p *runner.PanicError
		if !errors.As(s.runs()[0].Err, &p) || p.Value != "oops" || !bytes.Contains(p.Stack, []byte("TestPanicCountsAsFailure")) {
			t.Errorf("first error: %#v", s.runs()[0].Err)
		}
		if !errors.Is(s.runs()[1].Err, cause) {
			t.Errorf("second error does not wrap its cause: %v", s.runs()[1].Err)
		}
		if !errors.As(s.runs()[2].Err, new(*runtime.PanicNilError)) {
			t.Errorf("third error: %v", s.runs()[2].Err)
		}
		if s.runs()[3].Err != nil {
			t.Error(s.runs()[3].Err)
		}
		if n := strings.Count(log.String(), "sync panicked"); n != 3 || !strings.Contains(log.String(), "TestPanicCountsAsFailure") {
			t.Errorf("%d lines in the log:\n%s", n, &log)
		}

		time.Sleep(2 * time.Hour) // the timers still work
		if r := s.runs()[len(s.runs())-1].Reason(); r != runner.Periodic {
			t.Errorf("last run is %v, want periodic", r)
		}
		s.stop()
	})
}

func TestRunWaitsForTheRunInProgress(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var log bytes.Buffer
		s := tell(t, runner.Config{Log: slog.New(slog.NewTextHandler(&log, nil))}, func(ctx context.Context) error {
			<-ctx.Done()
			time.Sleep(time.Second) // the function may clean up
			return ctx.Err()
		}, (*runner.Runner).Trigger)
		if err := s.stop(); !errors.Is(err, context.Canceled) {
			t.Error(err)
		}
		if len(s.runs()) != 1 || s.runs()[0].Duration != time.Second {
			t.Errorf("Run did not wait for the run in progress: %v", s.runs())
		}
		if log.Len() != 0 {
			t.Errorf("stopping was logged as a failure: %s", &log)
		}
	})
}

func TestDoneContextRunsNothing(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	r, err := runner.New(runner.Config{}, func(context.Context) error {
		t.Error("the function ran")
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	r.Trigger()
	if err := r.Run(ctx); !errors.Is(err, context.Canceled) {
		t.Error(err)
	}
}

func TestSecondRunKeepsIntervals(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := tell(t, runner.Config{Min: 10 * time.Second}, succeed, (*runner.Runner).Trigger)
		if err := s.Run(t.Context()); !errors.Is(err, runner.ErrRunning) {
			t.Errorf("a concurrent second Run: %v", err)
		}
		s.stop()

		s.Trigger() // after Run: kept
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		if err := s.Run(ctx); !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("a later second Run: %v", err)
		}
		expect(t, "starts", s.starts(), 0, 10*time.Second) // Min applies across Runs
	})
}

func TestTraceSeesEveryRun(t *testing.T) {
	var got []string
	ctx, cancel := context.WithCancel(t.Context())
	trace := &runner.Hooks{
		Queued: func(at time.Time) {
			if at.IsZero() {
				t.Error("no time")
			}
			got = append(got, "queued")
		},
		SyncStart: func(i runner.RunInfo) { got = append(got, "start "+string(i.Reason())) },
		SyncDone:  func(runner.RunInfo) { got = append(got, "done"); cancel() },
	}
	r := must.Get(runner.New(runner.Config{Hooks: trace}, succeed))(t)
	r.Trigger()
	r.Trigger()
	r.Run(ctx)
	expect(t, "calls", got, "queued", "start triggered", "done")
}

// TestNoConcurrentTriggerIsLost is for the race detector. Each trigger must be
// followed by a run that starts after it.
func TestNoConcurrentTriggerIsLost(t *testing.T) {
	var done, seen atomic.Int64 // triggers made; made when the last run started
	ctx, cancel := context.WithCancel(t.Context())
	counted := 0
	r, err := runner.New(runner.Config{
		Hooks: &runner.Hooks{SyncDone: func(i runner.RunInfo) { counted += i.Triggers }},
	}, func(context.Context) error {
		seen.Store(done.Load())
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	var wg, running sync.WaitGroup
	running.Go(func() { r.Run(ctx) })
	const goroutines, each = 8, 500
	for range goroutines {
		wg.Go(func() {
			for range each {
				done.Add(1)
				r.Trigger()
			}
		})
	}
	wg.Wait()
	for seen.Load() != goroutines*each {
		runtime.Gosched() // until the last trigger's run
	}
	cancel()
	running.Wait()
	r.Trigger()
	if counted > goroutines*each {
		t.Errorf("%d triggers counted of %d", counted, goroutines*each)
	}
}

// notReady is the error of a function that waits.
type notReady struct{ error }

func (notReady) NotReady() bool { return true }

// TestWaitingIsNoFailure runs a function that is not ready for five minutes and then fails.
func TestWaitingIsNoFailure(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var log bytes.Buffer
		begin := time.Now()
		runs := 0
		r, err := runner.New(runner.Config{Retry: 10 * time.Second, Log: slog.New(slog.NewTextHandler(&log, &slog.HandlerOptions{
			ReplaceAttr: func(_ []string, a slog.Attr) slog.Attr {
				if a.Key == slog.TimeKey {
					return slog.Attr{}
				}
				return a
			},
		}))}, func(context.Context) error {
			runs++
			switch since := time.Since(begin); {
			case since < 125*time.Second:
				return fmt.Errorf("sync: %w", notReady{errors.New("no list of Services")})
			case since < 135*time.Second:
				return errors.New("broken")
			}
			return nil
		})
		if err != nil {
			t.Fatal(err)
		}
		ctx, cancel := context.WithTimeout(t.Context(), 5*time.Minute)
		defer cancel()
		r.Trigger()
		r.Run(ctx)
		want := "level=INFO msg=\"sync waits\" for=\"sync: no list of Services\"\n" +
			"level=WARN msg=\"sync waits\" for=\"sync: no list of Services\"\n" +
			"level=WARN msg=\"sync waits\" for=\"sync: no list of Services\"\n" +
			"level=WARN msg=\"sync failed\" error=broken reason=retry took=0s retry=10s\n"
		if log.String() != want || runs != 15 {
			t.Errorf("%d runs, log\n%swant\n%s", runs, &log, want)
		}
	})
}

func TestJoinedHooksAreCalledInOrder(t *testing.T) {
	var calls []string
	hooks := func(name string) *runner.Hooks {
		return &runner.Hooks{
			Queued:    func(time.Time) { calls = append(calls, name+" queued") },
			SyncStart: func(runner.RunInfo) { calls = append(calls, name+" start") },
			SyncDone:  func(i runner.RunInfo) { calls = append(calls, fmt.Sprint(name, " done ", i.Err)) },
		}
	}
	h := runner.Join(hooks("a"), nil, &runner.Hooks{SyncDone: hooks("b").SyncDone}, hooks("c"))
	h.Queued(time.Now())
	h.SyncStart(runner.RunInfo{})
	h.SyncDone(runner.RunInfo{})
	want := []string{"a queued", "c queued", "a start", "c start", "a done <nil>", "b done <nil>", "c done <nil>"}
	if !slices.Equal(calls, want) {
		t.Errorf("calls %q, want %q", calls, want)
	}
	runner.Join().Queued(time.Now())
}
