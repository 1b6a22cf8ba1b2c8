package backendtest

import (
	"context"
	"fmt"
	"runtime"
	"testing"
	"weak"

	"github.com/go-proxier/proxier/internal/testing/testtime"
	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/ruleset/conformance"
	"github.com/go-proxier/proxier/tracker"
)

// Simulate runs the conformance suite without packets for data planes that differ in how they write. In the
// long form each of them gets all worlds. In the short form they take turns: of a scripted world one gets
// the unchanged form, the next one failing writes, and the next one restarts.
func Simulate(t *testing.T, skip map[conformance.Feature]string, planes ...func(testing.TB, conformance.SimEnv) conformance.Fake) {
	t.Helper()
	for _, plane := range planes {
		changeRanges(t, plane)
	}
	if !testtime.Thorough() {
		conformance.Simulate(t, conformance.Simulation{
			First: *Seed, Worlds: len(planes), Skip: skip,
			New: func(tb testing.TB, env conformance.SimEnv) conformance.Fake {
				return planes[testtime.Turn(tb.Name(), len(planes))](tb, env)
			},
		})
		return
	}
	const worlds = 24
	for i, plane := range planes {
		t.Run(fmt.Sprintf("plane=%d", i), func(t *testing.T) {
			t.Parallel()
			conformance.Simulate(t, conformance.Simulation{First: *Seed + uint64(i*worlds), Worlds: worlds, Skip: skip, New: plane})
		})
	}
}

// ReleasesDeltas checks that a backend keeps no delta after its Apply. The one of a full sync
// holds every Service as it was then, and so would old versions for as long as the backend lives.
func ReleasesDeltas(t *testing.T, plane func(testing.TB, conformance.SimEnv) conformance.Fake) {
	p := NewNode(t, tracker.Config{})
	w := &witness{Backend: plane(t, SimEnv()).Backend()}
	cursor := p.Engine.Attach("backend", w)
	sync := func() {
		t.Helper()
		if err := cursor.Sync(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	for _, i := range UpTo(3) {
		p.Tracker.SetService(Numbered(i, Affinity(60)))
		p.Tracker.SetSlice(NumberedSlice(i, tracker.IPv4, 1, 2))
		p.Tracker.SetSlice(NumberedSlice(i, tracker.IPv6, 1, 2))
	}
	sync()
	p.Tracker.SetSlice(NumberedSlice(1, tracker.IPv4, 2, 3))
	sync()
	p.Tracker.DeleteService(ServiceName(2))
	sync()
	cursor.Resync()
	sync()
	for range 2 {
		runtime.GC()
	}
	if len(w.deltas) != 4 {
		t.Fatalf("%d deltas, want 4", len(w.deltas))
	}
	for i, d := range w.deltas {
		if d.Value() != nil {
			t.Errorf("the backend keeps delta %d of %d", i+1, len(w.deltas))
		}
	}
	runtime.KeepAlive(cursor)
	runtime.KeepAlive(w)
}

// witness is a Backend whose deltas can be seen to be gone.
type witness struct {
	ruleset.Backend
	deltas []weak.Pointer[ruleset.Change]
}

func (w *witness) Apply(ctx context.Context, d *ruleset.Delta) error {
	w.deltas = append(w.deltas, weak.Make(&d.Changes[0]))
	return w.Backend.Apply(ctx, d)
}
