package ruleset

import (
	"context"
	"testing"

	"github.com/go-proxier/proxier/tracker"
)

// witness is a plane that learns from [Delta.Outcome] what is in effect, as a Backend that wraps the
// plane would.
type witness struct {
	*plane
	effect map[tracker.Key]*Port
}

func newWitness(p *plane) *witness { return &witness{p, map[tracker.Key]*Port{}} }

func (w *witness) Apply(ctx context.Context, d *Delta) error {
	err := w.plane.Apply(ctx, d)
	for c, known := range d.Outcome(err) {
		switch {
		case !known:
		case c.New == nil:
			delete(w.effect, c.Key)
		default:
			w.effect[c.Key] = c.New
		}
	}
	return err
}

// check compares what w learned with what the cursor knows.
func (w *witness) check(t *testing.T, c *Cursor) {
	t.Helper()
	for k, s := range w.effect {
		if _, failed := c.tried[s.ID]; failed {
			continue // it may have lost frontends to accepted Services
		}
		if got := c.Port(k); diff(got, s) != 0 {
			t.Fatalf("%s: %s: the cursor has %v in effect, the outcome was %v", w.name, k, got, s)
		}
	}
	for k, s := range w.acked {
		if s != nil && w.effect[k] == nil {
			t.Fatalf("%s: %s: the outcome of no delta has it", w.name, k)
		}
	}
}
