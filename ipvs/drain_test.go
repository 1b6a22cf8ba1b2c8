//go:build linux

package ipvs

import (
	"testing"
	"time"

	v1 "k8s.io/api/core/v1"

	"github.com/go-proxier/proxier/internal/inet"
)

func TestPhases(t *testing.T) {
	for _, c := range []struct {
		from phase
		e    event
		to   phase
		do   action
	}{
		{absent, wanted, serving, create},
		{serving, wanted, serving, restore},
		{draining, wanted, serving, restore},
		{absent, unwanted, absent, nothing},
		{serving, unwanted, draining, quiesce},
		{draining, unwanted, draining, nothing},
		{absent, drained, absent, nothing},
		{serving, drained, serving, nothing},
		{draining, drained, absent, remove},
	} {
		if to, do := c.from.next(c.e); to != c.to || do != c.do {
			t.Errorf("phase %d, event %d: phase %d and action %d, want %d and %d", c.from, c.e, to, do, c.to, c.do)
		}
	}
}

// TestPhasesReached follows all sequences of events and compares what a kernel that
// does the actions has with what it must have.
func TestPhasesReached(t *testing.T) {
	var follow func(p phase, exists, weighs bool, depth int)
	follow = func(p phase, exists, weighs bool, depth int) {
		if exists != (p != absent) || weighs != (p == serving) {
			t.Fatalf("phase %d: exists %t, has weight %t", p, exists, weighs)
		}
		if depth == 0 {
			return
		}
		for _, e := range []event{wanted, unwanted, drained} {
			next, do := p.next(e)
			x, w := exists, weighs
			switch do {
			case create:
				if exists {
					t.Fatalf("phase %d: created twice", p)
				}
				x, w = true, true
			case restore:
				if !exists {
					t.Fatalf("phase %d: changed but not there", p)
				}
				w = true
			case quiesce:
				w = false
			case remove:
				if weighs {
					t.Fatalf("phase %d: removed without draining", p)
				}
				x, w = false, false
			}
			if e == wanted && !w {
				t.Fatalf("phase %d: wanted, but it gets no connections", p)
			}
			follow(next, x, w, depth-1)
		}
	}
	follow(absent, false, false, 7)
}

func TestDrainRule(t *testing.T) {
	start := time.Unix(1000, 0)
	for _, c := range []struct {
		name             string
		d                Drain
		proto            v1.Protocol
		active, inactive int
		after            time.Duration
		want             bool
	}{
		{"TCP without connections", Drain{}, v1.ProtocolTCP, 0, 0, 0, true},
		{"TCP with one", Drain{}, v1.ProtocolTCP, 1, 0, 240 * time.Hour, false},
		{"TCP with one that has ended", Drain{}, v1.ProtocolTCP, 0, 1, time.Hour, false},
		{"TCP before the limit", Drain{Limit: time.Minute}, v1.ProtocolTCP, 1, 0, time.Minute - 1, false},
		{"TCP at the limit", Drain{Limit: time.Minute}, v1.ProtocolTCP, 1, 0, time.Minute, true},
		{"TCP at once", Drain{Gracefully: []v1.Protocol{}}, v1.ProtocolTCP, 1, 1, answerTime, true},
		{"UDP at once", Drain{}, v1.ProtocolUDP, 5, 5, answerTime, true},
		{"UDP answers", Drain{}, v1.ProtocolUDP, 0, 0, answerTime - 1, false},
		{"SCTP at once", Drain{}, v1.ProtocolSCTP, 5, 5, answerTime, true},
		{"UDP gracefully", Drain{Gracefully: []v1.Protocol{v1.ProtocolUDP}}, v1.ProtocolUDP, 0, 5, time.Hour, false},
		{"SCTP gracefully", Drain{Gracefully: []v1.Protocol{v1.ProtocolSCTP}}, v1.ProtocolSCTP, 0, 0, 0, true},
	} {
		config, err := Config{Drain: c.d}.withDefaults()
		if err != nil {
			t.Fatal(err)
		}
		r := config.Drain.rule(inet.Protocol(c.proto))
		got := r.over(start, start.Add(c.after)) || r.unused(c.active, c.inactive)
		if got != c.want {
			t.Errorf("%s: drained %t, want %t", c.name, got, c.want)
		}
	}
}
