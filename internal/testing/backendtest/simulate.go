package backendtest

import (
	"fmt"
	"testing"

	"github.com/go-proxier/proxier/internal/testing/testtime"
	"github.com/go-proxier/proxier/ruleset/conformance"
)

// Simulate runs the conformance suite without packets for data planes that differ in how they write. In the
// long form each of them gets all worlds. In the short form they take turns: of a scripted world one gets
// the unchanged form, the next one failing writes, and the next one restarts.
func Simulate(t *testing.T, skip map[conformance.Feature]string, planes ...func(testing.TB, conformance.SimEnv) conformance.Fake) {
	t.Helper()
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
