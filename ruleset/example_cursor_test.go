package ruleset_test

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"time"

	v1 "k8s.io/api/core/v1"

	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/tracker"
)

// newEngine returns an engine for node-a that has the Service web.
func newEngine() (*ruleset.Engine, error) {
	t, err := tracker.New(tracker.Config{Node: tracker.NodeInfo{Name: "node-a"}})
	if err != nil {
		return nil, err
	}
	t.SetService(web)
	t.SetSlice(webSlice())
	t.MarkSynced(tracker.Services, tracker.Slices, tracker.Nodes)
	return ruleset.NewEngine(ruleset.Config{Tracker: t})
}

// A backend reports that one Service failed. The next Sync offers this Service again.
func ExampleCursor_Sync() {
	engine, err := newEngine()
	if err != nil {
		fmt.Println(err)
		return
	}
	tries := 0
	cursor := engine.Attach("plane", ruleset.BackendFunc(func(_ context.Context, d *ruleset.Delta) error {
		if tries++; tries == 1 {
			return &ruleset.PartialError{Failed: map[tracker.Key]error{webKey: errors.New("table full")}}
		}
		return nil
	}))
	ctx := context.Background()
	fmt.Println(cursor.Sync(ctx))
	fmt.Println("acknowledged:", cursor.Service(webKey) != nil)
	fmt.Println(cursor.Sync(ctx))
	fmt.Println("acknowledged:", cursor.Service(webKey) != nil)
	// Output:
	// ruleset: sync plane: 1 services failed; shop/web/TCP/IPv4: table full
	// acknowledged: false
	// <nil>
	// acknowledged: true
}

// Find the Service at an address, as the backend has acknowledged it.
func ExampleCursor_Lookup() {
	engine, err := newEngine()
	if err != nil {
		fmt.Println(err)
		return
	}
	cursor := engine.Attach("plane", ruleset.BackendFunc(func(context.Context, *ruleset.Delta) error { return nil }))
	if err := cursor.Sync(context.Background()); err != nil {
		fmt.Println(err)
	}
	s, f := cursor.Lookup(netip.MustParseAddrPort("172.30.0.1:80"), v1.ProtocolTCP)
	fmt.Println(s.Key, f.Kind, s.Pool(f.Target))
	// Output: shop/web/TCP/IPv4 cluster IP [10.1.0.1:8080 10.2.0.1:8080]
}

// Join a backend for IPv4 and one for IPv6.
func ExampleByFamily() {
	engine, err := newEngine()
	if err != nil {
		fmt.Println(err)
		return
	}
	family := func(name string) ruleset.Backend {
		return ruleset.BackendFunc(func(_ context.Context, d *ruleset.Delta) error {
			fmt.Println(name, len(d.Changes))
			return nil
		})
	}
	cursor := engine.Attach("both", ruleset.ByFamily(family("IPv4"), family("IPv6")))
	fmt.Println(cursor.Sync(context.Background()))
	// Output:
	// IPv4 1
	// IPv6 0
	// <nil>
}

// countingPlane is a backend whose data plane counts connections.
type countingPlane struct{ ruleset.BackendFunc }

func (countingPlane) Traffic(context.Context) (*ruleset.Traffic, error) {
	return &ruleset.Traffic{
		Known:    ruleset.CountsConnections | ruleset.CountsRefused,
		Services: map[tracker.Key]ruleset.Counters{webKey: {Connections: 7}},
	}, nil
}

// Read the counters of a backend that has some.
func ExampleTrafficReader() {
	var backend ruleset.Backend = countingPlane{}
	reader, ok := backend.(ruleset.TrafficReader)
	if !ok {
		return
	}
	traffic, err := reader.Traffic(context.Background())
	if err != nil {
		fmt.Println(err)
		return
	}
	for key, c := range traffic.Services {
		fmt.Println(key, "connections:", c.Connections)
	}
	fmt.Println("bytes known:", traffic.Known.Has(ruleset.CountsBytes))
	// Output:
	// shop/web/TCP/IPv4 connections: 7
	// bytes known: false
}

// Check repeatedly whether another process changed the rules.
func ExampleWatch() {
	checks := 0
	check := func(context.Context) error {
		if checks++; checks == 2 {
			return os.ErrClosed // the backend was closed
		}
		return &ruleset.DriftError{Backend: "nftables", Family: tracker.IPv4, What: "a map was deleted"}
	}
	err := ruleset.Watch(context.Background(), time.Millisecond, check, func(err error) { fmt.Println(err) })
	fmt.Println(errors.Is(err, os.ErrClosed))
	// Output:
	// nftables: IPv4 was altered by another process: a map was deleted
	// true
}
