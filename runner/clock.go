package runner

import "time"

// Clock supplies the time to a [Runner]. It must be safe for concurrent use.
type Clock interface {
	// Now returns the current time. It must not go backwards.
	Now() time.Time
	// NewTimer returns a timer that fires once, after d. d is positive.
	NewTimer(d time.Duration) Timer
}

// Timer is a timer of a [Clock]. Only one goroutine uses it.
type Timer interface {
	// C returns the channel on which the timer sends one value when it fires. It
	// always returns the same channel.
	C() <-chan time.Time
	// Stop releases the timer. The timer need not fire after that.
	Stop()
}

// systemClock is package time's clock.
type systemClock struct{}

func (systemClock) Now() time.Time                 { return time.Now() }
func (systemClock) NewTimer(d time.Duration) Timer { return systemTimer{time.NewTimer(d)} }

type systemTimer struct{ t *time.Timer }

func (t systemTimer) C() <-chan time.Time { return t.t.C }
func (t systemTimer) Stop()               { t.t.Stop() }
