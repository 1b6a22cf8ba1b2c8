package takeover

import (
	"testing"
	"time"
)

// TestWatchTellsWhetherTheOwnerRuns gives a Watch sequences of sightings.
func TestWatchTellsWhetherTheOwnerRuns(t *testing.T) {
	type look struct {
		at      int // seconds
		present bool
		stamp   uint64
		answers bool
		own     int // seconds; 0 for none
		want    State
	}
	for name, looks := range map[string][]look{
		"nothing": {{0, false, 0, false, 0, Absent}, {30, false, 0, false, 5, Absent}},
		"left before the agent started": {
			{0, true, 1, false, 0, Left}, {1, false, 0, false, 0, Absent}, {30, false, 0, false, 0, Absent},
		},
		"owner answers, then ends": {
			{0, true, 1, true, 0, InUse}, {1, true, 1, true, 0, InUse}, {100, true, 2, true, 50, InUse},
			{101, true, 2, false, 50, InUse}, {102, true, 2, false, 50, Left}, {103, false, 0, false, 50, Absent},
		},
		"owner restarts": {
			{0, true, 1, true, 0, InUse}, {1, true, 1, false, 0, InUse}, {2, true, 1, true, 0, InUse}, {3, true, 1, false, 0, InUse},
			{4, true, 1, false, 0, Left}, // removed too early, but its next sync restores them:
			{5, false, 0, true, 0, Absent}, {6, true, 9, true, 0, InUse}, {7, true, 9, true, 0, InUse},
		},
		"owner changes its rules and ends between two looks": {
			{0, true, 1, true, 0, InUse}, {1, true, 2, false, 0, InUse}, {2, true, 2, false, 0, Left},
		},
		"owner changes its rules as the last thing": {
			{0, true, 1, true, 0, InUse}, {1, true, 1, false, 0, InUse}, {2, true, 2, false, 0, Left},
		},
		"owner never answers and restores its rules": {
			{0, true, 1, false, 0, Left}, {1, false, 0, false, 0, Absent}, {31, true, 2, false, 0, InUse},
			// While no object changes, its rules are right.
			{600, true, 2, false, 0, InUse},
			// It follows a change.
			{601, true, 3, false, 600, InUse}, {700, true, 3, false, 600, InUse},
			// It does not.
			{800, true, 3, false, 800, InUse}, {801, true, 3, false, 801, InUse}, {839, true, 3, false, 838, InUse}, {840, true, 3, false, 839, Left},
		},
		"owner follows late": {
			{0, false, 0, false, 0, Absent}, {30, true, 1, false, 0, InUse},
			{60, true, 1, false, 50, InUse}, {85, true, 2, false, 50, InUse}, {130, true, 2, false, 50, InUse},
		},
		"owner follows a little earlier": {
			{0, false, 0, false, 0, Absent}, {30, true, 1, false, 0, InUse}, {100, true, 2, false, 102, InUse}, {200, true, 2, false, 102, InUse},
		},
		"another proxy is started": {
			{0, false, 0, false, 0, Absent}, {30, true, 1, false, 0, InUse}, {60, true, 1, true, 0, InUse},
		},
	} {
		t.Run(name, func(t *testing.T) {
			var w Watch
			at := func(s int) time.Time {
				if s == 0 {
					return time.Time{}
				}
				return time.Unix(int64(1000+s), 0)
			}
			for i, l := range looks {
				s := Sighting{Present: l.present, Stamp: l.stamp, Answers: l.answers, OwnChange: at(l.own)}
				if got := w.Look(time.Unix(int64(1000+l.at), 0), s); got != l.want {
					t.Errorf("look %d, at %d s: %s, want %s", i+1, l.at, got, l.want)
				}
			}
		})
	}
}

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
