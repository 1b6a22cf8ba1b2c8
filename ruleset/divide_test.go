package ruleset

import (
	"context"
	"errors"
	"fmt"
	"testing"

	"github.com/go-proxier/proxier/internal/testing/must"
	"github.com/go-proxier/proxier/tracker"
)

// TestDeltasOfManyChangesAreFew changes many Services at once: each delta examines what is left.
func TestDeltasOfManyChangesAreFew(t *testing.T) {
	tr, e, _ := budgeted(t, Budget{Delta: 10})
	deltas := 0
	c := e.Attach("b", BackendFunc(func(context.Context, *Delta) error { deltas++; return nil }))
	set := func(network int) {
		for i := range 2000 {
			tr.SetService(service(fmt.Sprint("s", i), fmt.Sprintf("172.30.%d.%d", i/250, i%250+1)))
			tr.SetSlice(slice(fmt.Sprint("s", i), fmt.Sprintf("10.%d.%d.%d", network, i/250, i%250+1)))
		}
		must.Do(t, c.Sync(t.Context()))
	}
	set(1)
	deltas = 0
	set(2)
	// What is left shrinks by a 32nd with each delta, and by ten elements in the end.
	if deltas < 32 || deltas > 300 {
		t.Errorf("%d deltas", deltas)
	}
}

// TestSlowBackendsGetSmallerDeltas compares the deltas of two backends of one Engine, one of which
// declares the size of its deltas.
func TestSlowBackendsGetSmallerDeltas(t *testing.T) {
	for budget, want := range map[int][2]int{0: {1, 1}, 5: {40, 40}, 50: {4, 20}} {
		tr, e, _ := budgeted(t, Budget{Delta: budget})
		deltas := [2]int{}
		var cursors [2]*Cursor
		for i := range deltas {
			b := Backend(BackendFunc(func(context.Context, *Delta) error { deltas[i]++; return nil }))
			if i == 1 {
				b = slowBackend{b}
			}
			cursors[i] = e.Attach("b", b)
			must.Do(t, cursors[i].Sync(t.Context()))
		}
		tr.SetService(service("a", "172.30.0.1"))
		tr.SetSlice(slice("a", many(1, 200)...))
		for i, c := range cursors {
			deltas[i] = 0
			must.Do(t, c.Sync(t.Context()))
			if deltas[i] != want[i] {
				t.Errorf("budget %d: backend %d got %d deltas, want %d", budget, i, deltas[i], want[i])
			}
		}
	}
}

type slowBackend struct{ Backend }

func (slowBackend) Limits(f tracker.Family) Limits {
	if f == tracker.IPv4 {
		return Limits{}
	}
	return Limits{Delta: 10}
}

// TestMoreIsSetBeforeTheLastDelta has a Sync of one delta, of several, and of several of which one
// fails.
func TestMoreIsSetBeforeTheLastDelta(t *testing.T) {
	tr, e, _ := budgeted(t, Budget{Delta: 10})
	var more []bool
	fails := 0
	c := e.Attach("b", BackendFunc(func(_ context.Context, d *Delta) error {
		more = append(more, d.More)
		if len(more) == fails {
			return errors.New("no")
		}
		return nil
	}))
	sync := func(deltas int) {
		t.Helper()
		more = nil
		if err := c.Sync(t.Context()); (err != nil) != (fails != 0) {
			t.Fatal(err)
		}
		if len(more) < deltas {
			t.Errorf("%d deltas, want %d", len(more), deltas)
		}
		for i, m := range more {
			if want := fails != 0 || i < len(more)-1; m != want {
				t.Errorf("delta %d of %d: More is %t", i+1, len(more), m)
			}
		}
	}
	sync(1)
	tr.SetService(service("a", "172.30.0.1"))
	tr.SetSlice(slice("a", many(1, 5)...))
	sync(1)
	tr.SetSlice(slice("a", many(2, 200)...))
	sync(3)
	fails = 2
	tr.SetSlice(slice("a", many(3, 200)...))
	sync(2)
	fails = 0
	sync(2)
}
