package conformance_test

import (
	"context"
	"os"
	"testing"

	"github.com/go-proxier/proxier/internal/testing/must"
	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/ruleset/conformance"
	"github.com/go-proxier/proxier/tracker"
)

// dataPlane represents a vendor's backend.
type dataPlane struct{ netns *os.File }

func newDataPlane(netns *os.File, _ []tracker.Family) (*dataPlane, error) {
	return &dataPlane{netns}, nil
}

func (*dataPlane) Apply(context.Context, *ruleset.Delta) error { return nil }

func (*dataPlane) Close() error { return nil }

// Test a vendor's backend. The test's package also has
//
//	func TestMain(m *testing.M) { conformance.Main(m) }
func Example() {
	_ = func(t *testing.T) { // func TestConformance
		conformance.Run(t, conformance.Options{
			New: func(tb testing.TB, env conformance.Env) ruleset.Backend {
				b := must.Get(newDataPlane(env.NetNS, env.Families))(tb)
				tb.Cleanup(func() { b.Close() })
				return b
			},
			Skip: map[conformance.Feature]string{
				conformance.SCTP:     "the data plane forwards TCP and UDP only",
				conformance.Affinity: "planned",
			},
		})
	}
}

// Check that no connection is lost while the data plane does something.
func ExampleWorld_Churn() {
	_ = func(t *testing.T) {
		w := conformance.NewWorld(t, conformance.Options{
			New: func(testing.TB, conformance.Env) ruleset.Backend { return &dataPlane{} },
		})
		// Set Services, and EndpointSlices with the addresses of w.Pods, in
		// w.Tracker; then:
		w.Sync()
		var targets []conformance.Target // the addresses of the Services
		c := w.Churn(targets, func() {
			w.Cursor.Resync()
			w.Sync()
		})
		for _, err := range c.Failures {
			t.Error(err)
		}
		t.Logf("%d connections", c.Opened)
	}
}
