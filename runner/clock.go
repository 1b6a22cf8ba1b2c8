package runner

import "time"

// Clock is where a [Runner] gets the time from. It must be safe for concurrent
// use.
type Clock interface {
	// Now returns the time, never less than an earlier answer.
	Now() time.Time
	// NewTimer returns a timer that fires once, after d, which is positive.
	NewTimer(d time.Duration) Timer
}

// Timer is a timer of a [Clock]. It is used by one goroutine.
type Timer interface {
	// C returns the channel, always the same, on which one value is sent when the
	// timer fires.
	C() <-chan time.Time
	// Stop gives the timer up: it need not fire any more.
	Stop()
}

// systemClock is package time's clock.
type systemClock struct{}

func (systemClock) Now() time.Time                 { return time.Now() }
func (systemClock) NewTimer(d time.Duration) Timer { return systemTimer{time.NewTimer(d)} }

type systemTimer struct{ t *time.Timer }

func (t systemTimer) C() <-chan time.Time { return t.t.C }
func (t systemTimer) Stop()               { t.t.Stop() }
