package conformance

import (
	"maps"
	"testing"

	"github.com/go-proxier/proxier/internal/testing/netlab"
	"github.com/go-proxier/proxier/internal/testing/testtime"
	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/tracker"
)

func TestMain(m *testing.M) {
	netlab.Parallel(8) // worlds of faulty backends wait for packets that do not arrive
	Main(m)
}

func needNft(t *testing.T) {
	t.Helper()
	netlab.NeedPrograms(t, "nft")
}

// fewFamilies returns IPv4, or nil in the long form.
func fewFamilies() []tracker.Family {
	if testtime.Thorough() {
		return nil
	}
	return []tracker.Family{tracker.IPv4}
}

// TestPlaneWithoutUDPPasses runs the whole suite against a backend that serves only TCP.
func TestPlaneWithoutUDPPasses(t *testing.T) {
	t.Parallel()
	testtime.NeedThorough(t)
	needNft(t)
	skip := maps.Clone(planeSkips)
	skip[UDP], skip[SCTP] = "the backend serves TCP only", "as UDP"
	Run(t, Options{Skip: skip, New: broken{distort: tcpOnly}.backend})
}

// tcpOnly removes the frontends of other protocols.
func tcpOnly(d *ruleset.Delta) {
	eachService(func(s *ruleset.Port) {
		if s.Key.Protocol != tcp {
			s.Frontends = nil
		}
	})(d)
}

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
