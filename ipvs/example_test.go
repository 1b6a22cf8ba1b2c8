//go:build linux

package ipvs_test

import (
	"context"
	"errors"
	"fmt"
	"log"
	"net/netip"
	"time"

	v1 "k8s.io/api/core/v1"

	"github.com/go-proxier/proxier/ipvs"
	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/ruleset/dataplane"
	"github.com/go-proxier/proxier/runner"
	"github.com/go-proxier/proxier/tracker"
)

// A node's data plane, from the tracker to the kernel.
func Example() {
	run := func(ctx context.Context, t *tracker.Tracker) error {
		engine, err := ruleset.NewEngine(ruleset.Config{Source: t})
		if err != nil {
			return err
		}
		backend, err := ipvs.New(ctx, ipvs.Config{
			Scheduler:  ipvs.Maglev,
			StrictARP:  true,
			DrainLimit: 15 * time.Minute,
		})
		if errors.Is(err, dataplane.ErrUnsupported) {
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

// A node falls back to round robin where the kernel has no Maglev.
func ExampleProbe() {
	config := ipvs.Config{Scheduler: ipvs.Maglev}
	if err := ipvs.Probe(context.Background(), config); errors.Is(err, dataplane.ErrUnsupported) {
		log.Print(err) // names the missing kernel module or program
		config.Scheduler = ipvs.RoundRobin
	} else if err != nil {
		log.Fatal(err)
	}
}

// Lookup finds the endpoints of a connection in the virtual servers of any process,
// kube-proxy's included.
func ExampleLookup() {
	found, err := ipvs.Lookup(context.Background(), ipvs.Config{}, dataplane.Query{Packet: ruleset.Packet{
		From:     netip.MustParseAddr("10.244.1.7"),
		To:       netip.MustParseAddrPort("10.96.0.10:53"),
		Protocol: v1.ProtocolUDP,
	}})
	if err != nil {
		log.Fatal(err)
	}
	fmt.Println(found.Endpoints, found.Where)
}

// An agent that changes to another backend removes the objects of this one.
func ExampleCleanup() {
	ctx, config := context.Background(), ipvs.Config{}
	owned, err := ipvs.Owned(ctx, config)
	if err == nil && owned {
		err = ipvs.Cleanup(ctx, config)
	}
	if err != nil {
		log.Fatal(err)
	}
}

func ExampleTraffic() {
	traffic, err := ipvs.Traffic(context.Background(), ipvs.Config{})
	if err != nil {
		log.Fatal(err)
	}
	for to, counters := range traffic.Unnamed {
		fmt.Println(to.Protocol, to.Addr, counters.Connections, counters.Bytes)
	}
}

// A privileged init container sets the kernel parameters for an agent that may not write
// /proc/sys.
func ExampleSetSysctls() {
	if err := ipvs.SetSysctls(context.Background(), ipvs.Config{StrictARP: true}); err != nil {
		log.Fatal(err)
	}
}
