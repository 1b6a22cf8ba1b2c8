package ruleset

import (
	"context"
	"errors"
	"testing"

	"github.com/go-proxier/proxier/runner"
	"github.com/go-proxier/proxier/tracker"
)

// TestFollowerThatFailsIsNoFailure has a health-check port that another process holds.
func TestFollowerThatFailsIsNoFailure(t *testing.T) {
	tr, e := world(t, Config{}, tracker.NodeInfo{Name: "n1"})
	var result, following error
	returns := func(err *error) Backend {
		return BackendFunc(func(context.Context, *Delta) error { return *err })
	}
	rules := e.Attach("rules", returns(&result))
	called := 0
	first := rules.Follow("first", returns(&following))
	second := rules.Follow("second", BackendFunc(func(context.Context, *Delta) error {
		called++
		return nil
	}))
	taken := errors.New("address in use")
	for i, tt := range []struct {
		rules, follower    error
		inEffect, notReady bool
	}{
		{nil, nil, true, false},
		{nil, taken, true, true},
		{nil, ErrNeedFull, true, true},
		{&PartialError{}, taken, true, false},
		{errors.New("broken"), nil, false, false},
	} {
		rules.Resync()
		first.Resync()
		second.Resync()
		result, following, called = tt.rules, tt.follower, 0
		tr.SetService(service("a", "172.30.0.1"))
		err := SyncAll(t.Context(), rules, first, second)
		if InEffect(err) != tt.inEffect || runner.IsNotReady(err) != tt.notReady {
			t.Errorf("%d: in effect %t, not ready %t: %v", i, InEffect(err), runner.IsNotReady(err), err)
		}
		for _, want := range []error{tt.rules, tt.follower} {
			if want != nil && !errors.Is(err, want) {
				t.Errorf("%d: error %v, want %v", i, err, want)
			}
		}
		if (called != 0) != tt.inEffect {
			t.Errorf("%d: the second follower was called %d times", i, called)
		}
	}
}
