package runner

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"runtime/debug"
	"sync"
	"sync/atomic"
	"time"

	"github.com/go-proxier/proxier/internal/complaint"
)

const defaultRetry = time.Second

// failureBurst failed runs are logged one after the other, and then one in each failureEvery.
const (
	failureBurst = 20
	failureEvery = 10 * time.Second
	// waitingEvery is the time between two lines about a function that is not ready.
	waitingEvery = time.Minute
)

// Config configures a [Runner].
type Config struct {
	// Min is the minimum time between the end of a run and the start of the next,
	// whatever its reason. 0 means no minimum. It must not be negative.
	Min time.Duration
	// Pace lengthens this pause after expensive runs. With the zero value the pause
	// is Min.
	Pace Pace
	// Retry is the time after a failed run, or one that was not ready, at which the function runs
	// again, unless a trigger comes first. 0 means 1 second. It must not be negative. If it is
	// less than Min, Min applies.
	Retry time.Duration
	// Max is the time between periodic runs, independent of other runs. 0 disables
	// periodic runs. Otherwise it must not be less than Min.
	Max time.Duration
	// Resync, if not nil, is called by the goroutine of Run before the function in each periodic run, and again
	// before its retry if the run fails. A panic in it counts as a panic of the run. With ruleset's Cursor.Resync,
	// each periodic run compares everything.
	Resync func()
	// Log receives one line for each failed run, of at most 20 runs and then one every 10 seconds, with the number of
	// runs before it that have none. While the function is not ready, there is one line a minute: see [IsNotReady].
	// Nil discards them.
	Log *slog.Logger
	// Hooks observes each run. It may be nil.
	Hooks *Hooks
}

// Pace makes the pause after a run proportional to its duration: Factor times the duration, but at least [Config].Min
// and at most Most. While triggers keep coming, runs take about 1/(1+Factor) of the time. A trigger after a quiet
// period still starts a run immediately.
type Pace struct {
	// Factor is the pause in multiples of the last run's duration. 0 means that the
	// pause is Config.Min. It must not be negative.
	Factor float64
	// Most is the maximum pause. It must not be less than Config.Min, nor greater
	// than Config.Max unless that is 0.
	Most time.Duration
	// Burst is the minimum pause after a run that served more than one trigger, since
	// more are likely to follow. Values below Config.Min have no effect. It must not be
	// negative, and nonzero only if Factor is. It must not be greater than Most.
	Burst time.Duration
}

// pause returns the pause after a run of the given duration that served the triggers.
func (c *Config) pause(took time.Duration, triggers int) time.Duration {
	if c.Pace.Factor == 0 {
		return c.Min
	}
	least := c.Min
	if triggers > 1 {
		least = max(least, c.Pace.Burst)
	}
	// Floating point, because a duration could overflow.
	if d := c.Pace.Factor * float64(took); d < float64(c.Pace.Most) {
		return max(least, time.Duration(d))
	}
	return c.Pace.Most
}

// Runner runs a function when triggered, within the bounds of a [Config]. [New] makes
// a Runner. Trigger is safe for concurrent use at any time.
type Runner struct {
	cfg Config
	fn  func(context.Context) error

	// wake holds one token, sent by the first trigger after the start of a run. A leftover token only makes Run
	// recompute when the next run is due.
	wake chan struct{}
	mu   sync.Mutex
	// triggers counts the triggers since the last run started. queuedAt is the time
	// of the first of them.
	triggers int
	queuedAt time.Time

	running atomic.Bool
	// The goroutine in Run owns the fields below.

	// failures bounds the rate of log lines about failed runs.
	failures complaint.Bucket
	// waited is the time of the last line about a function that is not ready, zero if it was
	// ready in the last run.
	waited time.Time
	// notBefore is the end of the pause after the last run.
	notBefore time.Time
	// retryAt is the time to retry a failed run, zero after a success.
	retryAt time.Time
	// periodicAt is the time of the next periodic run, zero before the first Run.
	periodicAt time.Time
}

// New returns a Runner for fn. It starts no goroutine. It returns an error if fn is
// nil or an interval violates the rules of [Config].
func New(cfg Config, fn func(context.Context) error) (*Runner, error) {
	switch {
	case fn == nil:
		return nil, errors.New("runner: the function is nil")
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
	case cfg.Pace.Burst < 0:
		return nil, fmt.Errorf("runner: Pace.Burst is negative: %v", cfg.Pace.Burst)
	case cfg.Pace.Burst != 0 && cfg.Pace.Factor == 0:
		return nil, fmt.Errorf("runner: Pace.Burst is %v, but Pace.Factor is 0", cfg.Pace.Burst)
	case cfg.Pace.Burst > cfg.Pace.Most:
		return nil, fmt.Errorf("runner: Pace.Most (%v) is less than Pace.Burst (%v)", cfg.Pace.Most, cfg.Pace.Burst)
	case cfg.Pace.Factor != 0 && cfg.Max != 0 && cfg.Max < cfg.Pace.Most:
		return nil, fmt.Errorf("runner: Max (%v) is less than Pace.Most (%v)", cfg.Max, cfg.Pace.Most)
	}
	cfg.Retry = cmp.Or(cfg.Retry, defaultRetry)
	cfg.Log = cmp.Or(cfg.Log, slog.New(slog.DiscardHandler))
	cfg.Hooks = cmp.Or(cfg.Hooks, &Hooks{})
	return &Runner{
		cfg: cfg, fn: fn, wake: make(chan struct{}, 1),
		failures: complaint.Bucket{Burst: failureBurst, Every: failureEvery},
	}, nil
}

// Trigger requests a run that starts after this call. It does not wait for the run, and may be called before, during
// and after Run. A trigger that no run has served when Run returns is kept for the next Run. Several triggers may
// lead to one run.
func (r *Runner) Trigger() {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.triggers++
	if r.triggers > 1 {
		return
	}
	r.queuedAt = time.Now()
	// Hold the lock, so that Queued precedes the SyncStart of the resulting run.
	call(r.cfg.Hooks.Queued, r.queuedAt)
	select {
	case r.wake <- struct{}{}:
	default:
	}
}

// Run runs the function at the times that the package documentation describes, until ctx is done, and returns
// ctx.Err(). A run in progress gets ctx, and Run waits for it. If another Run is in progress, Run returns
// [ErrRunning] immediately. Run may be called again after it has returned.
func (r *Runner) Run(ctx context.Context) error {
	if !r.running.CompareAndSwap(false, true) {
		return ErrRunning
	}
	defer r.running.Store(false)

	if r.cfg.Max != 0 && r.periodicAt.IsZero() {
		r.periodicAt = time.Now().Add(r.cfg.Max)
	}
	for ctx.Err() == nil {
		due, ok := r.due()
		d := time.Until(due)
		switch {
		case !ok:
			r.wait(ctx, nil)
		case d > 0:
			t := time.NewTimer(d)
			r.wait(ctx, t.C)
			t.Stop()
		default:
			r.sync(ctx)
		}
	}
	return ctx.Err()
}

// wait returns after a trigger, when the timer fires, or when ctx is done.
func (r *Runner) wait(ctx context.Context, timer <-chan time.Time) {
	select {
	case <-ctx.Done():
	case <-r.wake:
	case <-timer:
	}
}

// due returns the time of the next run. ok is false if only a trigger causes a run.
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

// sync performs one run and computes when the next is due.
func (r *Runner) sync(ctx context.Context) {
	info := RunInfo{Start: time.Now()}
	r.mu.Lock()
	info.Triggers, info.QueuedAt = r.triggers, r.queuedAt
	r.triggers, r.queuedAt = 0, time.Time{}
	r.mu.Unlock()
	switch {
	case !r.periodicAt.IsZero() && !r.periodicAt.After(info.Start):
		info.reason = periodic
	case info.Triggers > 0:
		info.reason = triggered
	default:
		info.reason = retry
	}

	call(r.cfg.Hooks.SyncStart, info)
	info.Err = r.runOnce(ctx, info.reason)
	end := time.Now()
	info.Duration = end.Sub(info.Start)

	r.notBefore = end.Add(r.cfg.pause(info.Duration, info.Triggers))
	r.retryAt = time.Time{}
	switch {
	case info.Err != nil:
		r.retryAt = end.Add(r.cfg.Retry)
		// A failed periodic run stays due, so that its retry is periodic too, but
		// waits for Retry like any other failure.
		if info.reason == periodic {
			r.periodicAt = r.retryAt
		}
	case info.reason == periodic:
		r.periodicAt = end.Add(r.cfg.Max)
	}
	if IsNotReady(info.Err) {
		r.reportWaiting(ctx, info)
	} else {
		r.waited = time.Time{}
		if info.Err != nil {
			r.report(ctx, info)
		}
	}
	call(r.cfg.Hooks.SyncDone, info)
}

// IsNotReady reports whether err, or an error that it wraps, has a method NotReady() bool that returns true, as
// ruleset.ErrNotSynced has. Such a run did nothing because something is missing, and is neither a success nor a
// failure.
func IsNotReady(err error) bool {
	var n interface{ NotReady() bool }
	return errors.As(err, &n) && n.NotReady()
}

// reportWaiting writes a line about a function that is not ready: at first, and then as a warning
// every minute.
func (r *Runner) reportWaiting(ctx context.Context, info RunInfo) {
	level := slog.LevelWarn
	if r.waited.IsZero() {
		level = slog.LevelInfo
	} else if info.Start.Sub(r.waited) < waitingEvery {
		return
	}
	r.waited = info.Start
	r.cfg.Log.LogAttrs(ctx, level, "sync waits", slog.String("for", complaint.Long(info.Err.Error())))
}

// runOnce calls the function and converts a panic to an error.
func (r *Runner) runOnce(ctx context.Context, why reason) (err error) {
	defer func() {
		if v := recover(); v != nil {
			err = &PanicError{Value: v, Stack: debug.Stack()}
		}
	}()
	if why == periodic && r.cfg.Resync != nil {
		r.cfg.Resync()
	}
	return r.fn(ctx)
}

func (r *Runner) report(ctx context.Context, info RunInfo) {
	attrs := []slog.Attr{
		slog.String("error", complaint.Long(info.Err.Error())),
		slog.String("reason", string(info.reason)),
		slog.Duration("took", info.Duration),
	}
	var p *PanicError
	if errors.As(info.Err, &p) {
		attrs = append(attrs, slog.String("stack", string(p.Stack)))
		r.cfg.Log.LogAttrs(ctx, slog.LevelError, "sync panicked", attrs...)
		return
	}
	if ctx.Err() != nil {
		return // the failure is the effect of stopping
	}
	suppressed, ok := r.failures.Take(time.Now())
	if !ok {
		return
	}
	attrs = append(attrs, slog.Duration("retry", r.cfg.Retry))
	if suppressed != 0 {
		attrs = append(attrs, slog.Int("suppressed", suppressed))
	}
	r.cfg.Log.LogAttrs(ctx, slog.LevelWarn, "sync failed", attrs...)
}

// ErrRunning is returned by [Runner.Run] if another call of Run is in progress.
var ErrRunning = errors.New("runner: already running")

// PanicError reports a panic in the function that a [Runner] runs.
type PanicError struct {
	// Value is the argument of panic.
	Value any
	// Stack is the stack trace of the panic, formatted as by [runtime/debug.Stack].
	Stack []byte
}

// Error returns the value as text, without the stack.
func (e *PanicError) Error() string { return fmt.Sprintf("runner: panic: %v", e.Value) }

// Unwrap returns the value if it is an error, as for a runtime panic, and nil
// otherwise.
func (e *PanicError) Unwrap() error {
	err, _ := e.Value.(error)
	return err
}
