package backendtest

import (
	"fmt"
	"slices"
	"strings"
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
				return planes[turn(tb.Name(), len(planes))](tb, env)
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

// turn returns which data plane gets a world, by the name of a test such as "TestSimulation/restart/plain"
// or "TestSimulation/seed=1". Worlds with consecutive seeds go to different ones.
func turn(test string, planes int) int {
	_, world, _ := strings.Cut(test, "/")
	world, mode, _ := strings.Cut(world, "/")
	n := slices.Index([]string{"plain", "failing_writes", "restarts"}, mode)
	for _, c := range []byte(world) {
		n += int(c)
	}
	return n % planes
}
