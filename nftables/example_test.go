//go:build linux

package nftables_test

import (
	"context"
	"errors"
	"log"
	"time"

	"github.com/go-proxier/proxier/nftables"
	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/runner"
	"github.com/go-proxier/proxier/tracker"
)

// A node agent: what the tracker is told reaches the kernel.
func Example() {
	ctx := context.Background()
	t, err := tracker.New(tracker.Config{Node: tracker.NodeInfo{Name: "node-a"}})
	if err != nil {
		log.Fatal(err)
	}
	engine, err := ruleset.NewEngine(ruleset.Config{Tracker: t})
	if err != nil {
		log.Fatal(err)
	}
	backend, err := nftables.New(ctx, nftables.Config{})
	if errors.Is(err, ruleset.ErrUnsupported) {
		log.Fatal("this kernel will not do: ", err)
	} else if err != nil {
		log.Fatal(err)
	}
	defer backend.Close()

	cursor := engine.Attach("nftables", backend)
	r, err := runner.New(runner.Config{
		Min: time.Second, Retry: 30 * time.Second,
		Max: time.Hour, Resync: cursor.Resync, // everything anew once an hour
	}, cursor.Sync)
	if err != nil {
		log.Fatal(err)
	}
	engine.Notify(r.Trigger)
	go backend.Watch(ctx, 5*time.Second, func(err error) {
		log.Print(err)
		cursor.Resync()
		r.Trigger()
	})
	// Elsewhere: t.SetService, t.SetSlice, …, and once all are in, t.MarkSynced.
	log.Print(r.Run(ctx))
}
