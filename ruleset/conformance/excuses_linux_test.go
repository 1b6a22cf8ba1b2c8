package conformance

import "testing"

func TestExcusesAreLimited(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		connections, excused int64
		ok                   bool
	}{
		{0, 0, true},
		{10, 1, true},
		{freeExcuses, freeExcuses, true},
		{100, freeExcuses + 1, false},
		{5000, 50, true},
		{5000, 51, false},
	} {
		var run, world excuses
		world.connections.Add(c.connections / 2)
		world.excused.Add(c.excused / 2)
		run.connections.Add(c.connections - c.connections/2)
		run.excused.Add(c.excused - c.excused/2)
		run.add(&world)
		if err := run.check(); (err == nil) != c.ok {
			t.Errorf("%d of %d connections excused: %v", c.excused, c.connections, err)
		}
	}
}
