package iptables_test

import (
	"context"
	"errors"
	"fmt"
	"log"
	"log/slog"
	"net/netip"
	"time"

	v1 "k8s.io/api/core/v1"

	"github.com/go-proxier/proxier/iptables"
	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/ruleset/dataplane"
	"github.com/go-proxier/proxier/tracker"
)

// The backend follows a ruleset and repairs its tables when another program alters them.
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
	backend, err := iptables.New(ctx, iptables.Config{LocalhostNodePorts: true, Log: slog.Default()})
	if errors.Is(err, dataplane.ErrUnsupported) {
		log.Fatal("not on this machine: ", err)
	} else if err != nil {
		log.Fatal(err)
	}
	defer backend.Close()
	cursor := engine.Attach("iptables", backend)

	// The agent's informers call t.SetService, t.SetSlice and the like, and t.MarkSynced
	// after the first list of each kind. Package runner calls Sync when objects change.
	if err := cursor.Sync(ctx); err != nil {
		log.Print(err)
	}
	log.Print(backend.Watch(ctx, 30*time.Second, func(err error) {
		log.Print(err)
		cursor.Resync()
	}))
}

// A node uses the first flavor of iptables that works there.
func ExampleProbe() {
	for _, flavor := range []iptables.Flavor{iptables.NFT, iptables.Legacy} {
		err := iptables.Probe(context.Background(), iptables.Config{Flavor: flavor})
		if err == nil {
			fmt.Println("use", flavor)
			return
		}
		if !errors.Is(err, dataplane.ErrUnsupported) {
			log.Fatal(err)
		}
		log.Print(err) // names the missing program, match or capability
	}
}

// Lookup finds the endpoints of a connection in the rules of any process, kube-proxy's
// included.
func ExampleLookup() {
	found, err := iptables.Lookup(context.Background(), iptables.Config{}, dataplane.Query{Packet: ruleset.Packet{
		From:     netip.MustParseAddr("10.244.1.7"),
		To:       netip.MustParseAddrPort("10.96.0.10:53"),
		Protocol: v1.ProtocolUDP,
	}})
	if err != nil {
		log.Fatal(err)
	}
	fmt.Println(found.Service, found.Endpoints, found.Where)
}

// An agent that changes to another backend removes the rules of this one.
func ExampleCleanup() {
	ctx, config := context.Background(), iptables.Config{}
	owned, err := iptables.Owned(ctx, config)
	if err == nil && owned {
		err = iptables.Cleanup(ctx, config)
	}
	if err != nil {
		log.Fatal(err)
	}
}

func ExampleTraffic() {
	traffic, err := iptables.Traffic(context.Background(), iptables.Config{})
	if err != nil {
		log.Fatal(err)
	}
	for key, counters := range traffic.Services {
		fmt.Println(key, counters.Connections)
	}
}

// A privileged init container sets the sysctl for an agent that may not write /proc/sys.
func ExampleSetSysctls() {
	if err := iptables.SetSysctls(context.Background(), iptables.Config{LocalhostNodePorts: true}); err != nil {
		log.Fatal(err)
	}
}

// The error of a sync has the line that iptables-restore refused for each Service.
func ExampleCommandError() {
	key := tracker.Key{Family: tracker.IPv4}
	key.Namespace, key.Name, key.Protocol = "default", "web", v1.ProtocolTCP
	var err error = &ruleset.PartialError{Failed: map[tracker.Key]error{
		key: &iptables.CommandError{Program: "iptables-nft-restore", Status: 2, Message: "line 3 failed", Line: 3, Text: "-A KUBE-PROXY-TRIAL -j NOWHERE"},
	}}

	var partial *ruleset.PartialError
	if errors.As(err, &partial) {
		for key, err := range partial.Failed {
			var command *iptables.CommandError
			if errors.As(err, &command) {
				fmt.Printf("%s/%s: line %d: %s\n", key.Namespace, key.Name, command.Line, command.Text)
			}
		}
	}
	// Output: default/web: line 3: -A KUBE-PROXY-TRIAL -j NOWHERE
}
