package runner

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"runtime/debug"
	"sync"
	"sync/atomic"
	"time"
)

// DefaultRetry is what [Config.Retry] is when it is 0.
const DefaultRetry = time.Second

// Config says how often a [Runner] runs.
type Config struct {
	// Min is the least time between the end of a run and the start of the next,
	// for whatever reason. 0 means none; it must not be negative.
	Min time.Duration
	// Pace lengthens that pause as runs get more expensive. The zero value leaves it at
	// Min.
	Pace Pace
	// Retry is how long after a failed run the function is run again, if no trigger
	// is earlier. 0 means [DefaultRetry]; it must not be negative. If it is less
	// than Min, Min decides.
	Retry time.Duration
	// Max is how long after a periodic run the next is due, whatever other runs
	// there were. 0 means that there are no periodic runs; otherwise it must not be
	// less than Min.
	Max time.Duration
	// Resync, if not nil, is called before each periodic run, by the goroutine that
	// called Run and as part of the run: a panic in it is treated alike. If the run
	// fails it is called again before the periodic run that makes up for it. ruleset's Cursor.Resync fits: with
	// it each periodic run compares everything.
	Resync func()
	// Log gets one line for each run that fails. Nil discards.
	Log *slog.Logger
	// Trace is told of each run. It may be nil.
	Trace *Trace
	// Clock is where the time comes from. Nil means package time.
	Clock Clock
}

// Pace makes the pause after a run follow what the run cost: the pause is Factor times
// the run's duration, but at least [Config.Min] and at most Most. While triggers keep
// coming, runs then take about 1/(1+Factor) of the time, however expensive they are, and
// a trigger after quiet is served at once.
type Pace struct {
	// Factor is the pause in multiples of the last run's duration. 0 means that the
	// pause is Config.Min; Factor must not be negative.
	Factor float64
	// Most bounds the pause. It must not be less than Config.Min, nor greater than
	// Config.Max unless that is 0.
	Most time.Duration
}

// pause returns the pause after a run of the given duration.
func (c *Config) pause(took time.Duration) time.Duration {
	if c.Pace.Factor == 0 {
		return c.Min
	}
	// In floating point, which a long run times a large factor does not overflow.
	if d := c.Pace.Factor * float64(took); d < float64(c.Pace.Most) {
		return max(c.Min, time.Duration(d))
	}
	return c.Pace.Most
}

// Runner runs a function when it is asked to, within the bounds of a [Config].
// It is made by [New]. Trigger may be called by any goroutine at any time.
type Runner struct {
	cfg Config
	fn  func(context.Context) error

	// wake has room for one token, put there by the first trigger after a run
	// started. A token may be left over; it only makes Run look again.
	wake chan struct{}
	mu   sync.Mutex
	// triggers since the last run started, and when the first was made.
	triggers int
	queuedAt time.Time

	running atomic.Bool
	// What follows belongs to the goroutine in Run.

	// notBefore is the end of the pause after the last run.
	notBefore time.Time
	// retryAt is when a failed run is tried again, zero after one that succeeded.
	retryAt time.Time
	// periodicAt is when the next periodic run is due, zero before the first Run.
	periodicAt time.Time
}

// New returns a Runner of fn. It starts nothing. It fails if fn is nil or an
// interval is not as [Config] demands.
func New(cfg Config, fn func(context.Context) error) (*Runner, error) {
	switch {
	case fn == nil:
		return nil, errors.New("runner: no function to run")
	case cfg.Min < 0:
		return nil, fmt.Errorf("runner: Min is negative: %v", cfg.Min)
	case cfg.Retry < 0:
		return nil, fmt.Errorf("runner: Retry is negative: %v", cfg.Retry)
	case cfg.Max < 0:
		return nil, fmt.Errorf("runner: Max is negative: %v", cfg.Max)
	case cfg.Max != 0 && cfg.Max < cfg.Min:
		return nil, fmt.Errorf("runner: Max (%v) is less than Min (%v)", cfg.Max, cfg.Min)
	case !(cfg.Pace.Factor >= 0): // or not a number
		return nil, fmt.Errorf("runner: Pace.Factor is negative: %v", cfg.Pace.Factor)
	case cfg.Pace.Factor != 0 && cfg.Pace.Most < cfg.Min:
		return nil, fmt.Errorf("runner: Pace.Most (%v) is less than Min (%v)", cfg.Pace.Most, cfg.Min)
	case cfg.Pace.Factor != 0 && cfg.Max != 0 && cfg.Max < cfg.Pace.Most:
		return nil, fmt.Errorf("runner: Max (%v) is less than Pace.Most (%v)", cfg.Max, cfg.Pace.Most)
	}
	if cfg.Retry == 0 {
		cfg.Retry = DefaultRetry
	}
	if cfg.Log == nil {
		cfg.Log = slog.New(slog.DiscardHandler)
	}
	if cfg.Clock == nil {
		cfg.Clock = systemClock{}
	}
	return &Runner{cfg: cfg, fn: fn, wake: make(chan struct{}, 1)}, nil
}

// Trigger asks for a run that starts after this call. It never blocks on a run
// and may be called before, during and after Run: what was asked for before Run,
// or too late for it, is kept for the next Run. Many calls lead to one run.
func (r *Runner) Trigger() {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.triggers++
	if r.triggers > 1 {
		return
	}
	r.queuedAt = r.cfg.Clock.Now()
	// With the lock held, so that the run this leads to cannot be told of first.
	r.cfg.Trace.queued(r.queuedAt)
	select {
	case r.wake <- struct{}{}:
	default:
	}
}

// Run runs the function as the package documentation says until ctx is done, and
// then returns ctx.Err(). A run that is under way when that happens has ctx and
// is waited for. It returns [ErrRunning] at once if another Run is under way.
// When it has returned it may be called again.
func (r *Runner) Run(ctx context.Context) error {
	if !r.running.CompareAndSwap(false, true) {
		return ErrRunning
	}
	defer r.running.Store(false)

	if r.cfg.Max != 0 && r.periodicAt.IsZero() {
		r.periodicAt = r.cfg.Clock.Now().Add(r.cfg.Max)
	}
	for ctx.Err() == nil {
		due, ok := r.due()
		if !ok {
			r.wait(ctx, nil)
			continue
		}
		if d := due.Sub(r.cfg.Clock.Now()); d > 0 {
			t := r.cfg.Clock.NewTimer(d)
			r.wait(ctx, t.C())
			t.Stop()
			continue
		}
		r.sync(ctx)
	}
	return ctx.Err()
}

// wait returns when a trigger came, or the timer fired, or ctx is done.
func (r *Runner) wait(ctx context.Context, timer <-chan time.Time) {
	select {
	case <-ctx.Done():
	case <-r.wake:
	case <-timer:
	}
}

// due returns when the next run is to start, or false if only a trigger can tell.
func (r *Runner) due() (at time.Time, ok bool) {
	earliest := func(t time.Time) {
		if !t.IsZero() && (!ok || t.Before(at)) {
			at, ok = t, true
		}
	}
	r.mu.Lock()
	earliest(r.queuedAt)
	r.mu.Unlock()
	earliest(r.retryAt)
	earliest(r.periodicAt)
	if at.Before(r.notBefore) {
		at = r.notBefore
	}
	return at, ok
}

// sync does one run and sets when the next is due.
func (r *Runner) sync(ctx context.Context) {
	info := Info{Start: r.cfg.Clock.Now()}
	r.mu.Lock()
	info.Triggers, info.QueuedAt = r.triggers, r.queuedAt
	r.triggers, r.queuedAt = 0, time.Time{}
	r.mu.Unlock()
	switch {
	case !r.periodicAt.IsZero() && !r.periodicAt.After(info.Start):
		info.Reason = Periodic
	case info.Triggers > 0:
		info.Reason = Triggered
	default:
		info.Reason = Retry
	}

	r.cfg.Trace.syncStart(info)
	info.Err = r.call(ctx, info.Reason)
	end := r.cfg.Clock.Now()
	info.Duration = end.Sub(info.Start)

	r.notBefore = end.Add(r.cfg.pause(info.Duration))
	r.retryAt = time.Time{}
	switch {
	case info.Err != nil:
		r.retryAt = end.Add(r.cfg.Retry)
		// A periodic run that failed stays due, so that what is run again is
		// periodic too, but must wait like any other failure.
		if info.Reason == Periodic {
			r.periodicAt = r.retryAt
		}
	case info.Reason == Periodic:
		r.periodicAt = end.Add(r.cfg.Max)
	}
	if info.Err != nil {
		r.report(ctx, info)
	}
	r.cfg.Trace.syncDone(info)
}

// call calls the function and makes a panic an error.
func (r *Runner) call(ctx context.Context, why Reason) (err error) {
	defer func() {
		if v := recover(); v != nil {
			err = &PanicError{Value: v, Stack: debug.Stack()}
		}
	}()
	if why == Periodic && r.cfg.Resync != nil {
		r.cfg.Resync()
	}
	return r.fn(ctx)
}

func (r *Runner) report(ctx context.Context, info Info) {
	attrs := []slog.Attr{
		slog.Any("error", info.Err),
		slog.String("reason", info.Reason.String()),
		slog.Duration("took", info.Duration),
	}
	var p *PanicError
	if errors.As(info.Err, &p) {
		attrs = append(attrs, slog.String("stack", string(p.Stack)))
		r.cfg.Log.LogAttrs(ctx, slog.LevelError, "sync panicked", attrs...)
		return
	}
	if ctx.Err() != nil {
		return // it was told to stop
	}
	attrs = append(attrs, slog.Duration("retry", r.cfg.Retry))
	r.cfg.Log.LogAttrs(ctx, slog.LevelWarn, "sync failed", attrs...)
}
