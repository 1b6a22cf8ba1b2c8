// Printdelta is the smallest useful agent: it prints what a backend would have to
// do. It reads JSON from standard input, one object after another, each with one
// of the fields
//
//	{"service": Service}
//	{"slice": EndpointSlice}
//	{"gone": {"namespace": "...", "name": "..."}}   a Service that was deleted
//	{"synced": true}                                that was all there is so far
//
// and prints, from "synced" or the end of the input on, "+", "~" or "-" for each
// port of a Service that is new, changed or gone, and below it for its endpoints.
package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log"
	"log/slog"
	"os"
	"time"

	v1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/runner"
	"github.com/go-proxier/proxier/tracker"
)

func main() {
	if err := run(context.Background(), os.Stdin, os.Stdout); err != nil {
		log.Fatal(err)
	}
}

// run prints deltas until the input ends.
func run(ctx context.Context, in io.Reader, out io.Writer) error {
	t, err := tracker.New(tracker.Config{Node: tracker.NodeInfo{Name: "node-a", Zone: "z1"}, Log: slog.Default()})
	if err != nil {
		return err
	}
	e, err := ruleset.NewEngine(ruleset.Config{Tracker: t, Log: slog.Default()})
	if err != nil {
		return err
	}
	cur := e.Attach("print", ruleset.BackendFunc(func(_ context.Context, d *ruleset.Delta) error {
		show(out, d)
		return nil
	}))
	r, err := runner.New(runner.Config{Min: 100 * time.Millisecond, Max: time.Hour}, cur.Sync)
	if err != nil {
		return err
	}
	e.Notify(r.Trigger)

	running, stop := context.WithCancel(ctx)
	ended := make(chan error)
	go func() { ended <- r.Run(running) }()
	err = feed(t, in)
	stop()
	<-ended
	return errors.Join(err, cur.Sync(ctx)) // what came since the last run
}

// feed hands in what it reads.
func feed(t *tracker.Tracker, in io.Reader) error {
	for dec := json.NewDecoder(in); ; {
		var o struct {
			Service *v1.Service
			Slice   *discovery.EndpointSlice
			Gone    *types.NamespacedName
			Synced  bool
		}
		err := dec.Decode(&o)
		if err != nil && !errors.Is(err, io.EOF) {
			return fmt.Errorf("decode: %w", err)
		}
		if o.Service != nil {
			t.SetService(o.Service)
		}
		if o.Slice != nil {
			t.SetSlice(o.Slice)
		}
		if o.Gone != nil {
			t.DeleteService(*o.Gone)
		}
		if o.Synced || err != nil {
			t.MarkSynced(tracker.Services, tracker.Slices, tracker.Nodes)
		}
		if err != nil {
			return nil
		}
	}
}

// show prints a delta.
func show(out io.Writer, d *ruleset.Delta) {
	for _, c := range d.Changes {
		switch {
		case c.New == nil:
			fmt.Fprintln(out, "-", c.Key)
		case c.Old == nil:
			fmt.Fprintln(out, "+", c.Key, c.New.Port)
		default:
			fmt.Fprintln(out, "~", c.Key, c.New.Port)
		}
		for ep := range c.Upserted() {
			fmt.Fprintln(out, "   +", ep)
		}
		for ep := range c.Removed() {
			fmt.Fprintln(out, "   -", ep)
		}
	}
}
