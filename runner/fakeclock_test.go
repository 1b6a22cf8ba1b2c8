package runner_test

import (
	"time"

	"github.com/go-proxier/proxier/runner"
)

// scriptClock is a clock with scripted events. Waiting for a timer, or sleeping,
// processes all events until then, at the events' own times. A Runner on it needs no
// other goroutine, and the same script gives the same runs.
type scriptClock struct {
	now    time.Time
	script []time.Time // when event is called; ascending
	event  func()
	// end is when the script ends and done is called.
	end  time.Time
	done func()
}

func (c *scriptClock) Now() time.Time { return c.now }

// NewTimer processes the next event, or waits until the timer fires if that is
// earlier. An event at the time at which the timer fires comes first. The timer fires
// after an event too: that is early, and the Runner must check the time.
func (c *scriptClock) NewTimer(d time.Duration) runner.Timer {
	fires := c.now.Add(d)
	switch {
	case len(c.script) > 0 && !c.script[0].After(fires):
		c.next()
	case fires.After(c.end):
		c.now = c.end
		c.done()
	default:
		c.now = fires
	}
	fired := make(chan time.Time, 1)
	fired <- c.now
	return scriptTimer(fired)
}

// Sleep processes all events in the next d.
func (c *scriptClock) Sleep(d time.Duration) {
	until := c.now.Add(d)
	for len(c.script) > 0 && !c.script[0].After(until) {
		c.next()
	}
	c.now = until
}

// next processes all events at the time of the next event.
func (c *scriptClock) next() {
	c.now = c.script[0]
	for len(c.script) > 0 && c.script[0].Equal(c.now) {
		c.script = c.script[1:]
		c.event()
	}
}

type scriptTimer chan time.Time

func (t scriptTimer) C() <-chan time.Time { return t }
func (scriptTimer) Stop()                 {}
