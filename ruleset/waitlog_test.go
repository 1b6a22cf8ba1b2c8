package ruleset_test

import (
	"bytes"
	"context"
	"log/slog"
	"strings"
	"testing"
	"time"

	"github.com/go-proxier/proxier/internal/testing/must"
	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/runner"
	"github.com/go-proxier/proxier/tracker"
)

// TestLogNamesWhatTheEngineWaitsFor runs README's agent without tracker.KindNodes in MarkSynced.
func TestLogNamesWhatTheEngineWaitsFor(t *testing.T) {
	var out bytes.Buffer
	log := slog.New(slog.NewTextHandler(&out, nil))
	tr := must.Get(tracker.New(tracker.Config{Node: tracker.NodeInfo{Name: "node-a"}, Log: log}))(t)
	engine := must.Get(ruleset.NewEngine(ruleset.Config{Source: tr, Log: log}))(t)
	cursor := engine.Attach("data plane", ruleset.BackendFunc(func(context.Context, *ruleset.Delta) error { return nil }))
	ctx, cancel := context.WithCancel(t.Context())
	runs := 0
	r, err := runner.New(runner.Config{
		Min: time.Millisecond, Retry: time.Millisecond, Max: 10 * time.Millisecond, Resync: cursor.Resync, Log: log,
		Hooks: &runner.Hooks{SyncDone: func(runner.RunInfo) {
			if runs++; runs == 5 {
				cancel()
			}
		}},
	}, cursor.Sync)
	if err != nil {
		t.Fatal(err)
	}
	engine.Notify(r.Trigger)
	tr.MarkSynced(tracker.KindServices, tracker.KindSlices)
	_ = r.Run(ctx)
	if n := strings.Count(out.String(), "not all of these are listed yet: [Nodes]"); n != 1 {
		t.Errorf("%d lines name the source after %d runs:\n%s", n, runs, out.String())
	}
}
