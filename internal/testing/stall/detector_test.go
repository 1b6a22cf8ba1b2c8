package stall

import (
	"testing"
	"time"
)

func TestStallsAreReported(t *testing.T) {
	begin := time.Now().Add(-time.Hour)
	at := func(d time.Duration) time.Time { return begin.Add(d) }
	p := &Detector{last: []time.Time{begin, begin}}
	for d := time.Duration(0); d < time.Minute; d += pollInterval {
		if d > 10*time.Second && d < 11*time.Second {
			continue
		}
		p.poll(0, at(d))
		if d < 10200*time.Millisecond || d > 11500*time.Millisecond {
			p.poll(1, at(d)) // the second processor stands still a little longer
		}
	}
	if n, total := p.Stalls(); n != 1 || total < 3*time.Second/2-pollInterval || total > 3*time.Second/2+3*pollInterval {
		t.Errorf("%d stalls of %v in all, want one of 1.5 seconds", n, total)
	}
	p.last = []time.Time{time.Now(), time.Now()} // no stall since
	for since, want := range map[time.Duration]bool{
		0: true, 9 * time.Second: true, 10500 * time.Millisecond: true, 12 * time.Second: false, time.Hour: false,
	} {
		if p.Since(at(since)) != want {
			t.Errorf("since %v: %t", since, !want)
		}
	}
	if !p.Within(at(9*time.Second), at(10500*time.Millisecond)) || p.Within(at(9*time.Second), at(9500*time.Millisecond)) {
		t.Error("Within does not look at the end of the period")
	}
	// The stall was from just before 10 s to just after 11.5 s.
	for _, tt := range []struct{ from, to, running time.Duration }{
		{0, 9 * time.Second, 9 * time.Second},
		{9 * time.Second, 12 * time.Second, 3*time.Second/2 - 2*pollInterval},
		{10500 * time.Millisecond, 11 * time.Second, 0},
		{11 * time.Second, 13 * time.Second, 3*time.Second/2 - pollInterval},
	} {
		if got := p.Running(at(tt.from), at(tt.to)); got < tt.running || got > tt.running+3*pollInterval {
			t.Errorf("running from %v to %v: %v, want %v", tt.from, tt.to, got, tt.running)
		}
	}
	// A stall that is still going on.
	p.last[1] = time.Now().Add(-time.Second)
	if !p.Since(time.Now().Add(-time.Second / 2)) {
		t.Error("a stall that is going on is not reported")
	}
}
