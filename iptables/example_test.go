package iptables_test

import (
	"context"
	"errors"
	"log"
	"log/slog"
	"time"

	"github.com/go-proxier/proxier/iptables"
	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/tracker"
)

// The backend follows a ruleset and repairs its tables when another program alters them.
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
	backend, err := iptables.New(ctx, iptables.Config{LocalhostNodePorts: true, Log: slog.Default()})
	if errors.Is(err, ruleset.ErrUnsupported) {
		log.Fatal("not on this machine: ", err)
	} else if err != nil {
		log.Fatal(err)
	}
	defer backend.Close()
	cursor := engine.Attach("iptables", backend)

	// Elsewhere: t.SetService, t.SetSlice, …, and once all are in, t.MarkSynced.
	// The package runner calls Sync when there is something to do.
	if err := cursor.Sync(ctx); err != nil {
		log.Print(err)
	}
	log.Print(backend.Watch(ctx, 30*time.Second, func(err error) {
		log.Print(err)
		cursor.Resync()
	}))
}
