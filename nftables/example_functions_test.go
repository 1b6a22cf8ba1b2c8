package nftables_test

import (
	"context"
	"errors"
	"fmt"
	"log"
	"net/netip"

	v1 "k8s.io/api/core/v1"

	"github.com/go-proxier/proxier/nftables"
	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/ruleset/dataplane"
)

// An agent that uses nftables if the kernel supports it.
func ExampleProbe() {
	err := nftables.Probe(context.Background(), nftables.Config{})
	var missing *dataplane.UnsupportedError
	switch {
	case errors.As(err, &missing):
		log.Print("cannot use nftables: ", missing)
	case err != nil:
		log.Fatal(err)
	}
}

// The endpoints of new connections to 10.96.0.10, TCP port 443, by the rules of a running agent.
func ExampleLookup() {
	found, err := nftables.Lookup(context.Background(), nftables.Config{}, dataplane.Query{
		Packet: ruleset.Packet{To: netip.MustParseAddrPort("10.96.0.10:443"), Protocol: v1.ProtocolTCP},
	})
	if err != nil {
		log.Fatal(err)
	}
	fmt.Println(found.Where, found.Service, found.Endpoints)
}

// The connections of each Service port, by the rules of a running agent.
func ExampleTraffic() {
	traffic, err := nftables.Traffic(context.Background(), nftables.Config{})
	if err != nil {
		log.Fatal(err)
	}
	for port, counters := range traffic.Services {
		fmt.Println(port, counters.Connections)
	}
}

// The Service ports without endpoints, by the rules of a running agent.
func ExampleReady() {
	endpoints, err := nftables.Ready(context.Background(), nftables.Config{})
	if err != nil {
		log.Fatal(err)
	}
	for port, n := range endpoints {
		if n == 0 {
			fmt.Println(port)
		}
	}
}

// A node that no longer uses nftables.
func ExampleCleanup() {
	if err := nftables.Cleanup(context.Background(), nftables.Config{}); err != nil {
		log.Fatal(err)
	}
}

// The object that the kernel refused, and the kernel's reason.
func ExampleError() {
	err := nftables.Cleanup(context.Background(), nftables.Config{})
	var refused *nftables.Error
	if errors.As(err, &refused) {
		fmt.Println(refused.What, refused.Errno, refused.Message)
	}
}
