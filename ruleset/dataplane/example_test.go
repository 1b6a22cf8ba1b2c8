package dataplane_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"time"

	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/ruleset/dataplane"
	"github.com/go-proxier/proxier/tracker"
)

var webKey = tracker.Key{
	ServicePortName: tracker.ServicePortName{
		NamespacedName: types.NamespacedName{Namespace: "shop", Name: "web"},
		Protocol:       v1.ProtocolTCP,
	},
	Family: tracker.IPv4,
}

// Join a backend for IPv4 and one for IPv6.
func ExampleByFamily() {
	family := func(name string) ruleset.Backend {
		return ruleset.BackendFunc(func(_ context.Context, d *ruleset.Delta) error {
			fmt.Println(name, len(d.Changes))
			return nil
		})
	}
	both := dataplane.ByFamily(family("IPv4"), family("IPv6"))
	fmt.Println(both.Apply(context.Background(), &ruleset.Delta{Full: true, Changes: []ruleset.Change{{Key: webKey}}}))
	// Output:
	// IPv4 1
	// IPv6 0
	// <nil>
}

// countingPlane is a backend whose data plane counts connections.
type countingPlane struct{ ruleset.BackendFunc }

func (countingPlane) Traffic(context.Context) (*dataplane.Traffic, error) {
	return &dataplane.Traffic{
		Known:    dataplane.CountsConnections | dataplane.CountsRefused,
		Services: map[tracker.Key]dataplane.Counters{webKey: {Connections: 7}},
	}, nil
}

// Read the counters of a backend that has some.
func ExampleTrafficReader() {
	var backend ruleset.Backend = countingPlane{}
	reader, ok := backend.(dataplane.TrafficReader)
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
	fmt.Println("bytes known:", traffic.Known.Has(dataplane.CountsBytes))
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
		return &dataplane.DriftError{Backend: "nftables", Family: tracker.IPv4, What: "a map was deleted"}
	}
	err := dataplane.Watch(context.Background(), time.Millisecond, check, func(err error) { fmt.Println(err) })
	fmt.Println(errors.Is(err, os.ErrClosed))
	// Output:
	// nftables: IPv4 was altered by another process: a map was deleted
	// true
}
