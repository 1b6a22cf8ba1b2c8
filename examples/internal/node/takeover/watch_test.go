package takeover

import (
	"testing"
	"time"
)

// TestWatchTellsWhetherTheOwnerRuns gives a Watch sequences of sightings.
func TestWatchTellsWhetherTheOwnerRuns(t *testing.T) {
	const none, inUse, left = "", "in-use", "left"
	type look struct {
		at      int // seconds
		stamp   uint64
		answers bool
		objects int // seconds; 0 for none
		want    string
	}
	for name, looks := range map[string][]look{
		"nothing": {{0, 0, false, 0, none}, {30, 0, false, 5, none}},
		"left before the agent started": {
			{0, 1, false, 0, left}, {1, 0, false, 0, none}, {30, 0, false, 0, none},
		},
		"owner answers, then ends": {
			{0, 1, true, 0, inUse}, {1, 1, true, 0, inUse}, {100, 2, true, 50, inUse},
			{101, 2, false, 50, inUse}, {102, 2, false, 50, left}, {103, 0, false, 50, none},
		},
		"owner restarts": {
			{0, 1, true, 0, inUse}, {1, 1, false, 0, inUse}, {2, 1, true, 0, inUse}, {3, 1, false, 0, inUse},
			{4, 1, false, 0, left}, // removed too early, but its next sync restores them:
			{5, 0, true, 0, none}, {6, 9, true, 0, inUse}, {7, 9, true, 0, inUse},
		},
		"owner changes its rules and ends between two looks": {
			{0, 1, true, 0, inUse}, {1, 2, false, 0, inUse}, {2, 2, false, 0, left},
		},
		"owner changes its rules as the last thing": {
			{0, 1, true, 0, inUse}, {1, 1, false, 0, inUse}, {2, 2, false, 0, left},
		},
		"owner never answers and restores its rules": {
			{0, 1, false, 0, left}, {1, 0, false, 0, none}, {31, 2, false, 0, inUse},
			// While no object changes, its rules are right.
			{600, 2, false, 0, inUse},
			// It follows a change.
			{601, 3, false, 600, inUse}, {700, 3, false, 600, inUse},
			// It does not.
			{800, 3, false, 800, inUse}, {801, 3, false, 801, inUse}, {839, 3, false, 838, inUse}, {840, 3, false, 839, left},
		},
		"owner follows late": {
			{0, 0, false, 0, none}, {30, 1, false, 0, inUse},
			{60, 1, false, 50, inUse}, {85, 2, false, 50, inUse}, {130, 2, false, 50, inUse},
		},
		"owner follows a little earlier": {
			{0, 0, false, 0, none}, {30, 1, false, 0, inUse}, {100, 2, false, 102, inUse}, {200, 2, false, 102, inUse},
		},
		"another proxy is started": {
			{0, 0, false, 0, none}, {30, 1, false, 0, inUse}, {60, 1, true, 0, inUse},
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
				w.Look(time.Unix(int64(1000+l.at), 0), l.stamp, l.answers, at(l.objects))
				if got := w.State(); got != l.want {
					t.Errorf("look %d, at %d s: %q, want %q", i+1, l.at, got, l.want)
				}
			}
		})
	}
}

// TestWaitIsBounded gives a Watch sequences of looks at an owner that answers.
func TestWaitIsBounded(t *testing.T) {
	type look struct {
		at      int // seconds
		stamp   uint64
		objects int // seconds; 0 for none
		idle    bool
	}
	for name, looks := range map[string][]look{
		"no rules":                       {{0, 0, 0, false}, {299, 0, 100, false}, {300, 0, 100, true}},
		"rules appear":                   {{0, 0, 0, false}, {290, 1, 0, false}, {600, 1, 0, false}},
		"rules are removed and restored": {{0, 1, 0, false}, {100, 0, 0, false}, {200, 2, 0, false}, {450, 2, 0, false}},
		"rules are removed":              {{0, 1, 0, false}, {100, 0, 0, false}, {399, 0, 0, false}, {400, 0, 0, true}},
		"nothing changes":                {{0, 1, 0, false}, {100_000, 1, 0, false}},
		"rules follow":                   {{0, 1, 0, false}, {60, 1, 50, false}, {100, 2, 50, false}, {1000, 2, 50, false}},
		"rules do not follow":            {{0, 1, 0, false}, {60, 1, 50, false}, {340, 1, 330, false}, {350, 1, 330, true}},
		"objects change at the start":    {{0, 1, 0, false}, {15, 1, 3, false}, {1000, 1, 3, false}},
	} {
		t.Run(name, func(t *testing.T) {
			var w Watch
			begin := time.Now()
			for _, l := range looks {
				var objects time.Time
				if l.objects != 0 {
					objects = begin.Add(time.Duration(l.objects) * time.Second)
				}
				w.Look(begin.Add(time.Duration(l.at)*time.Second), l.stamp, true, objects)
				if w.Idle() != l.idle || !w.Runs() {
					t.Fatalf("after %d s: idle %t, runs %t", l.at, w.Idle(), w.Runs())
				}
			}
		})
	}
}
