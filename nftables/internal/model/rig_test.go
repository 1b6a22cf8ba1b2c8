package model

import (
	"context"
	"errors"
	"testing"

	"github.com/go-proxier/proxier/internal/testing/backendtest"
	"github.com/go-proxier/proxier/internal/testing/worldgen"
	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/tracker"
)

// rig is a pipeline to a fake kernel that a test drives.
type rig struct {
	testing.TB
	tracker *tracker.Tracker
	engine  *ruleset.Engine
	cursor  *ruleset.Cursor
	backend *follower
	// wrap, if not nil, is called instead of the backend.
	wrap func(context.Context, *ruleset.Delta) error
	// refusals holds the transactions that the kernel refused.
	refusals []error
}

func newRig(tb testing.TB) *rig {
	tb.Helper()
	p := backendtest.NewNode(tb, tracker.Config{OnService: worldgen.OnService, OnEndpoint: worldgen.OnEndpoint})
	r := &rig{TB: tb, tracker: p.Tracker, engine: p.Engine, backend: newFollower(tracker.IPv4, tracker.IPv6)}
	r.cursor = r.engine.Attach("fake", ruleset.BackendFunc(func(ctx context.Context, d *ruleset.Delta) error {
		if r.wrap != nil {
			return r.wrap(ctx, d)
		}
		err := r.backend.Apply(ctx, d)
		for _, refusal := range []error{errAbsent, errExists, errFull, errBusy} {
			if errors.Is(err, refusal) {
				r.refusals = append(r.refusals, err)
			}
		}
		return err
	}))
	return r
}

func (r *rig) sync() {
	r.Helper()
	if err := r.cursor.Sync(r.Context()); err != nil {
		r.Fatal(err)
	}
}

// verify compares the kernel with one that gets everything in one delta.
func (r *rig) verify() {
	r.Helper()
	cold := newFollower(r.backend.families...)
	c := r.engine.Attach("cold", cold)
	defer c.Detach()
	if err := c.Sync(r.Context()); err != nil {
		r.Fatal(err)
	}
	if got, want := r.backend.kernel.dump(), cold.kernel.dump(); got != want {
		r.Fatalf("the tables are\n%s\nwant\n%s", got, want)
	}
}

var (
	svc     = backendtest.Numbered
	epSlice = backendtest.NumberedSlice
)
