package ruleset

import (
	"context"
	"fmt"
	"testing"
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
		if err := c.Sync(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	set(1)
	deltas = 0
	set(2)
	// What is left shrinks by a 32nd with each delta, and by ten elements in the end.
	if deltas < 32 || deltas > 300 {
		t.Errorf("%d deltas", deltas)
	}
}
