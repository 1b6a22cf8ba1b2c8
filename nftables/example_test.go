//go:build linux

package nftables_test

import (
	"context"
	"errors"
	"log"
	"time"

	"github.com/go-proxier/proxier/nftables"
	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/ruleset/dataplane"
	"github.com/go-proxier/proxier/runner"
	"github.com/go-proxier/proxier/tracker"
)

// A node agent. Another part of it passes Services and EndpointSlices to the tracker.
func Example() {
	ctx := context.Background()
	t, err := tracker.New(tracker.Config{Node: tracker.NodeInfo{Name: "node-a"}})
	if err != nil {
		log.Fatal(err)
	}
	engine, err := ruleset.NewEngine(ruleset.Config{Source: t})
	if err != nil {
		log.Fatal(err)
	}
	backend, err := nftables.New(ctx, nftables.Config{})
	if errors.Is(err, dataplane.ErrUnsupported) {
		log.Fatal("unsupported kernel: ", err)
	} else if err != nil {
		log.Fatal(err)
	}
	defer backend.Close()

	cursor := engine.Attach("nftables", backend)
	r, err := runner.New(runner.Config{
		Min: time.Second, Retry: 30 * time.Second,
		Max: time.Hour, Resync: cursor.Resync, // a full sync once an hour
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
	// The other part calls t.SetService, t.SetSlice, …, and t.MarkSynced after the initial objects.
	log.Print(r.Run(ctx))
}
