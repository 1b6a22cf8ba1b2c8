package conformance

import (
	"testing"
	"time"
)

func TestPulse(t *testing.T) {
	begin := time.Now().Add(-time.Hour)
	at := func(d time.Duration) time.Time { return begin.Add(d) }
	p := &pulse{last: begin}
	for d := time.Duration(0); d < time.Minute; d += beat {
		if d > 10*time.Second && d < 11*time.Second {
			continue
		}
		p.look(at(d))
	}
	p.last = time.Now() // all is well since
	for since, want := range map[time.Duration]bool{
		0: true, 9 * time.Second: true, 10500 * time.Millisecond: true, 12 * time.Second: false, time.Hour: false,
	} {
		if p.stopped(at(since)) != want {
			t.Errorf("since %v: %t", since, !want)
		}
	}
	// One that has just begun to stand still.
	p.last = time.Now().Add(-time.Second)
	if !p.stopped(time.Now().Add(-time.Second / 2)) {
		t.Error("it is standing still, and says it is not")
	}
}
