package ruleset

import (
	"context"
	"errors"
	"math/rand/v2"
	"testing"
	"time"

	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/go-proxier/proxier/runner"
	"github.com/go-proxier/proxier/tracker"
)

// follower is a plane that follows a cursor.
type follower struct {
	*plane
	cursor *Cursor
}

func follow(t *testing.T, r *rand.Rand, leader *Cursor) *follower {
	f := &follower{plane: newPlane(t, r, leader.name+"'s follower", true, r.IntN(2)*40)}
	f.cursor = leader.Follow(f.name, f)
	return f
}

// sync syncs f and compares what f has with what its leader has in effect.
func (f *follower) sync(t *testing.T) {
	t.Helper()
	f.during = nil
	if f.cursor.leader.node == nil {
		if err := f.cursor.Sync(t.Context()); !errors.Is(err, ErrNotSynced) {
			t.Fatalf("%s: a sync before the leader's: %v", f.name, err)
		}
		return
	}
	if !syncs(t, f.cursor) {
		return
	}
	leader := f.cursor.leader
	var want []*Port
	for id := range leader.states {
		if s := leader.states[id].acked; s != nil {
			want = append(want, s)
		}
	}
	for _, s := range want {
		if diff(f.acked[s.Key], s) != 0 {
			t.Fatalf("%s: %s: got %v, want %v", f.name, s.Key, f.acked[s.Key], s)
		}
	}
	if len(f.acked) != len(want) {
		t.Fatalf("%s: got %d Services, want %d", f.name, len(f.acked), len(want))
	}
	wanted := &Snapshot{Gen: leader.gen, Ports: want, Node: leader.node}
	f.compare(wanted)
	f.checkStatus(f.cursor, wanted, true, false)
}

// TestFollowerIsNotAheadOfTheRules fails a Service of the rules. What follows has what is in effect.
func TestFollowerIsNotAheadOfTheRules(t *testing.T) {
	tr, e := world(t, Config{}, tracker.NodeInfo{Name: "n1"})
	var result error
	rules := e.Attach("rules", BackendFunc(func(context.Context, *Delta) error { return result }))
	var got []string
	follower := rules.Follow("announcer", BackendFunc(func(_ context.Context, d *Delta) error {
		for _, tr := range d.Triggers {
			got = append(got, tr.Service.Name+" triggered")
		}
		for _, c := range d.Changes {
			text := c.Key.Name
			if c.New == nil {
				text += " gone"
			} else {
				for _, ep := range c.New.Selection.Reachable {
					text += " " + ep.Addr.Addr().String()
				}
			}
			got = append(got, text)
		}
		return nil
	}))
	sync := func(want ...string) {
		t.Helper()
		got = nil
		if err := SyncAll(t.Context(), rules, follower); !errors.Is(err, result) {
			t.Fatal(err)
		}
		if len(got) != len(want) {
			t.Fatalf("the follower got %q, want %q", got, want)
		}
		for i := range want {
			if got[i] != want[i] {
				t.Fatalf("the follower got %q, want %q", got, want)
			}
		}
	}
	if err := follower.Sync(t.Context()); !errors.Is(err, ErrNotSynced) {
		t.Errorf("nothing is in effect: %v", err)
	}
	tr.SetService(service("a", "172.30.0.1"))
	tr.SetSlice(slice("a", "10.0.0.1", "10.0.0.2"))
	sync("a 10.0.0.1 10.0.0.2")

	a, b := key("a", tracker.IPv4), key("b", tracker.IPv4)
	result = &PartialError{Failed: map[tracker.Key]error{a: errInjected, b: errInjected}}
	changed := slice("a", "10.0.0.2", "10.0.0.3")
	changed.Annotations = map[string]string{v1.EndpointsLastChangeTriggerTime: time.Now().Add(time.Hour).UTC().Format(time.RFC3339Nano)}
	tr.SetSlice(changed)
	tr.SetService(service("b", "172.30.0.2"))
	tr.SetSlice(slice("b", "10.0.1.1"))
	sync()
	result = nil
	sync("a triggered", "a 10.0.0.2 10.0.0.3", "b 10.0.1.1")

	result = errors.New("broken")
	tr.DeleteService(types.NamespacedName{Namespace: "default", Name: "a"})
	if err := SyncAll(t.Context(), rules, follower); !errors.Is(err, result) || len(got) != 3 {
		t.Errorf("error %v, the follower got %q", err, got)
	}
	result = nil
	sync("a gone")
	rules.Detach()
	if err := follower.Sync(t.Context()); !errors.Is(err, ErrDetached) {
		t.Errorf("a follower of a detached cursor: %v", err)
	}
	if len(e.gone) != 0 {
		t.Errorf("%d Services are left", len(e.gone))
	}
}

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
