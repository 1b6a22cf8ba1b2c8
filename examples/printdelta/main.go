// Printdelta is the smallest useful agent: it prints the changes that a backend would
// apply. It reads JSON objects from standard input. Each has one of the fields
//
//	{"service": Service}
//	{"slice": EndpointSlice}
//	{"gone": {"namespace": "...", "name": "..."}}   a deleted Service
//	{"synced": true}                                the end of the initial objects
//
// From "synced" or the end of the input on, it prints "+", "~" or "-" for each new, changed
// or deleted port of a Service, and, below it, for each of its endpoints.
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

	v1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/go-proxier/proxier/ruleset"
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
	e, err := ruleset.NewEngine(ruleset.Config{Source: t, Log: slog.Default()})
	if err != nil {
		return err
	}
	cur := e.Attach("print", ruleset.BackendFunc(func(_ context.Context, d *ruleset.Delta) error {
		show(out, d)
		return nil
	}))
	for dec := json.NewDecoder(in); ; {
		var o struct {
			Service *v1.Service
			Slice   *discovery.EndpointSlice
			Gone    *types.NamespacedName
			Synced  bool
		}
		switch err := dec.Decode(&o); {
		case errors.Is(err, io.EOF):
			t.MarkSynced(tracker.KindServices, tracker.KindSlices, tracker.KindNodes)
			return cur.Sync(ctx)
		case err != nil:
			return fmt.Errorf("cannot decode the input: %w", err)
		case o.Service != nil:
			t.SetService(o.Service)
		case o.Slice != nil:
			t.SetSlice(o.Slice)
		case o.Gone != nil:
			t.DeleteService(*o.Gone)
		case o.Synced:
			t.MarkSynced(tracker.KindServices, tracker.KindSlices, tracker.KindNodes)
		}
		// Before "synced" there is no delta.
		if err := cur.Sync(ctx); err != nil && !errors.Is(err, ruleset.ErrNotSynced) {
			return err
		}
	}
}

func show(out io.Writer, d *ruleset.Delta) {
	for _, c := range d.Changes {
		sign := "~"
		if c.Old == nil {
			sign = "+"
		} else if c.New == nil {
			sign = "-"
		}
		fmt.Fprintln(out, sign, c.Key)
		for ep := range c.Upserted() {
			fmt.Fprintln(out, "   +", ep)
		}
		for ep := range c.Removed() {
			fmt.Fprintln(out, "   -", ep)
		}
	}
}
