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

// LookupAll finds the endpoints of connections in the rules of any process, kube-proxy's
// included.
func ExampleLookupAll() {
	found, err := iptables.LookupAll(context.Background(), iptables.Config{}, []dataplane.Query{{Packet: ruleset.Packet{
		From:     netip.MustParseAddr("10.244.1.7"),
		To:       netip.MustParseAddrPort("10.96.0.10:53"),
		Protocol: v1.ProtocolUDP,
	}}})
	if err != nil {
		log.Fatal(err)
	}
	fmt.Println(found[0].Service, found[0].Endpoints, found[0].Where)
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
