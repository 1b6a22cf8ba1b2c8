package endpointslice_test

import (
	"fmt"
	"net/netip"

	discovery "k8s.io/api/discovery/v1"

	"github.com/go-proxier/proxier/endpointslice"
)

// Move an endpoint from one slice of its Service to another and add one. Only the new
// endpoint is a change.
func Example() {
	c := endpointslice.New(endpointslice.Plain(nil))
	c.Set(slice("web-1", "web", ep("10.0.0.1"), ep("10.0.0.2")))
	c.Set(slice("web-2", "web", ep("10.0.0.3")))
	c.Take()

	c.Set(slice("web-1", "web", ep("10.0.0.1")))
	c.Set(slice("web-2", "web", ep("10.0.0.2"), ep("10.0.0.3"), ep("10.0.0.4")))
	for _, change := range c.Take() {
		for i, port := range change.New {
			fmt.Println(change.Service, port.Name, "had", len(change.Old[i].Endpoints), "has", len(port.Endpoints))
			for _, e := range port.Endpoints {
				fmt.Println(" ", e.Addr)
			}
		}
	}
	// Output:
	// ns/web http had 3 has 4
	//   10.0.0.1:80
	//   10.0.0.2:80
	//   10.0.0.3:80
	//   10.0.0.4:80
}

// server is the part of an endpoint that a caller needs.
type server struct {
	addr  netip.AddrPort
	ready bool
}

// Use a Cache with an endpoint type of the caller.
func ExampleCache() {
	c := endpointslice.New(endpointslice.Config[server]{
		Make: func(_ *discovery.EndpointSlice, _ *discovery.Endpoint, from *endpointslice.Endpoint, s *server) error {
			s.addr, s.ready = from.Addr, from.Ready
			return nil
		},
		Equal: func(a, b *server) bool { return *a == *b },
		Key: func(s *server) (netip.AddrPort, endpointslice.Rank) {
			return s.addr, endpointslice.Conditions{Ready: s.ready}.Rank()
		},
		Report: func(s *discovery.EndpointSlice, left []endpointslice.LeftOut) {
			for _, l := range left {
				fmt.Println(s.Name, l.Reason, l.Err)
			}
		},
	})
	c.Set(slice("web-1", "web", ep("10.0.0.1"), ep("10.0.0.x")))
	for _, change := range c.Take() {
		for _, s := range change.New[0].Endpoints {
			fmt.Println(change.Service, s.addr, s.ready)
		}
	}
	// Output:
	// web-1 ProxyAddress endpoint 1: "10.0.0.x" is not an IP address
	// ns/web 10.0.0.1:80 true
}

// Kubernetes accepts leading zeros, which do not mean octal.
func ExampleParseAddr() {
	fmt.Println(endpointslice.ParseAddr("172.30.0.041"))
	fmt.Println(endpointslice.ParseAddr("fe80::1%eth0"))
	// Output:
	// 172.30.0.41 <nil>
	// invalid IP "fe80::1%eth0": addresses with a zone are not supported
}
