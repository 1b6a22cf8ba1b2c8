package runner_test

import (
	"time"

	"github.com/go-proxier/proxier/runner"
)

// scriptClock is a clock on which a story happens: whoever asks for a timer, or
// sleeps, lives through all events until then, at the events' own times. With it
// a Runner needs no other goroutine, and the same story gives the same runs.
type scriptClock struct {
	now    time.Time
	script []time.Time // when event is called; ascending
	event  func()
	// end is when the story ends: done is called then.
	end  time.Time
	done func()
}

func (c *scriptClock) Now() time.Time { return c.now }

// NewTimer lives through the next event or until the timer fires, whichever is
// first. An event at the very time the timer fires comes before it. The timer
// fires after an event too: that is too early, and the Runner must ask again.
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

// Sleep lives through everything in the next d.
func (c *scriptClock) Sleep(d time.Duration) {
	until := c.now.Add(d)
	for len(c.script) > 0 && !c.script[0].After(until) {
		c.next()
	}
	c.now = until
}

// next lives through all events of the next event's time.
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
