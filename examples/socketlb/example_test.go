//go:build linux

package socketlb_test

import (
	"context"
	"log"

	"github.com/go-proxier/proxier/examples/socketlb"
	"github.com/go-proxier/proxier/nftables"
	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/tracker"
)

// The backend stands before package nftables, on the same engine.
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
	behind, err := nftables.New(ctx, nftables.Config{})
	if err != nil {
		log.Fatal(err)
	}
	defer behind.Close()
	backend, err := socketlb.New(ctx, socketlb.Config{})
	if err != nil {
		log.Fatal(err)
	}
	defer backend.Close()

	rules, sockets := engine.Attach("nftables", behind), engine.Attach("socketlb", backend)
	// Elsewhere: t.SetService, t.SetSlice, and t.MarkSynced after all objects are handed in.
	if err := rules.Sync(ctx); err != nil {
		log.Fatal(err)
	}
	if err := sockets.Sync(ctx); err != nil {
		log.Print(err) // connections are left to package nftables
	}
}
