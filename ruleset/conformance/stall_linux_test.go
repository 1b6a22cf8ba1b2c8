package conformance

import (
	"testing"
	"time"
)

func TestStallDetector(t *testing.T) {
	begin := time.Now().Add(-time.Hour)
	at := func(d time.Duration) time.Time { return begin.Add(d) }
	p := &stallDetector{last: begin}
	for d := time.Duration(0); d < time.Minute; d += pollInterval {
		if d > 10*time.Second && d < 11*time.Second {
			continue
		}
		p.poll(at(d))
	}
	p.last = time.Now() // no stall since
	for since, want := range map[time.Duration]bool{
		0: true, 9 * time.Second: true, 10500 * time.Millisecond: true, 12 * time.Second: false, time.Hour: false,
	} {
		if p.stalledSince(at(since)) != want {
			t.Errorf("since %v: %t", since, !want)
		}
	}
	if !p.stalledWithin(at(9*time.Second), at(10500*time.Millisecond)) || p.stalledWithin(at(9*time.Second), at(9500*time.Millisecond)) {
		t.Error("stalledWithin does not look at the end of the period")
	}
	// A stall that is still going on.
	p.last = time.Now().Add(-time.Second)
	if !p.stalledSince(time.Now().Add(-time.Second / 2)) {
		t.Error("a stall that is going on is not reported")
	}
}

func TestExcusesAreLimited(t *testing.T) {
	for _, c := range []struct {
		connections, excused int64
		ok                   bool
	}{
		{0, 0, true}, {10, 1, true}, {freeExcuses, freeExcuses, true}, {100, freeExcuses + 1, false},
		{5000, 50, true}, {5000, 51, false},
	} {
		var run, world excuses
		world.connections.Add(c.connections / 2)
		world.excused.Add(c.excused / 2)
		run.connections.Add(c.connections - c.connections/2)
		run.excused.Add(c.excused - c.excused/2)
		run.add(&world)
		if err := run.check(); (err == nil) != c.ok {
			t.Errorf("%d of %d connections excused: %v", c.excused, c.connections, err)
		}
	}
}
