//go:build linux

package ipvs_test

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/go-proxier/proxier/ipvs"
	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/runner"
	"github.com/go-proxier/proxier/tracker"
)

// A node's data plane, from the tracker to the kernel.
func Example() {
	run := func(ctx context.Context, t *tracker.Tracker) error {
		engine, err := ruleset.NewEngine(ruleset.Config{Tracker: t})
		if err != nil {
			return err
		}
		backend, err := ipvs.New(ctx, ipvs.Config{
			Scheduler: ipvs.Maglev,
			StrictARP: true,
			Drain:     ipvs.Drain{Limit: 15 * time.Minute},
		})
		if errors.Is(err, ruleset.ErrUnsupported) {
			return fmt.Errorf("try another backend: %w", err)
		}
		if err != nil {
			return err
		}
		defer backend.Close()
		cursor := engine.Attach("ipvs", backend)
		r, err := runner.New(runner.Config{Min: time.Second, Retry: 30 * time.Second, Max: time.Hour, Resync: cursor.Resync}, cursor.Sync)
		if err != nil {
			return err
		}
		engine.Notify(r.Trigger)
		go backend.Watch(ctx, 10*time.Minute, func(error) {
			cursor.Resync()
			r.Trigger()
		})
		return r.Run(ctx)
	}
	_ = run
	// Output:
}
