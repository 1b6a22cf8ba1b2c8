package takeover

import (
	"testing"
	"time"
)

// TestWaitIsBounded gives a Wait sequences of looks.
func TestWaitIsBounded(t *testing.T) {
	type look struct {
		at      int // seconds
		present bool
		stamp   uint64
		objects int // seconds; 0 for none
		over    bool
	}
	for name, looks := range map[string][]look{
		"no rules":                       {{0, false, 0, 0, false}, {299, false, 0, 100, false}, {300, false, 0, 100, true}},
		"rules appear":                   {{0, false, 0, 0, false}, {290, true, 1, 0, false}, {600, true, 1, 0, false}},
		"rules are removed and restored": {{0, true, 1, 0, false}, {100, false, 0, 0, false}, {200, true, 2, 0, false}, {450, true, 2, 0, false}},
		"rules are removed":              {{0, true, 1, 0, false}, {100, false, 0, 0, false}, {300, false, 0, 0, true}},
		"nothing changes":                {{0, true, 1, 0, false}, {100_000, true, 1, 0, false}},
		"rules follow":                   {{0, true, 1, 0, false}, {60, true, 1, 50, false}, {100, true, 2, 50, false}, {1000, true, 2, 50, false}},
		"rules do not follow":            {{0, true, 1, 0, false}, {60, true, 1, 50, false}, {340, true, 1, 330, false}, {350, true, 1, 330, true}},
		"objects change at the start":    {{0, true, 1, 0, false}, {15, true, 1, 3, false}, {1000, true, 1, 3, false}},
	} {
		t.Run(name, func(t *testing.T) {
			var w Wait
			begin := time.Now()
			for _, l := range looks {
				var objects time.Time
				if l.objects != 0 {
					objects = begin.Add(time.Duration(l.objects) * time.Second)
				}
				if got := w.Over(begin.Add(time.Duration(l.at)*time.Second), Rules{Present: l.present, Stamp: l.stamp}, objects); got != l.over {
					t.Fatalf("after %d s: over is %t", l.at, got)
				}
			}
		})
	}
}
