package dataplane

import (
	"context"
	"net/netip"

	v1 "k8s.io/api/core/v1"

	"github.com/go-proxier/proxier/tracker"
)

// TrafficReader is a [ruleset.Backend] whose data plane counts traffic by Service port. A
// backend need not implement it. The kernel backends of this module do. Each of their
// packages also has a function Traffic, which takes a context and the package's
// Config and reads the same counters without a Backend, whether an agent is running
// or not.
type TrafficReader interface {
	// Traffic reads the counters of all Service ports. It may be called concurrently with
	// the Backend's other methods, and is safe to call at any rate that its cost allows: it
	// reads the data plane each time. It returns an error if the counters cannot be read.
	Traffic(ctx context.Context) (*Traffic, error)
}

// Traffic holds the counters of a data plane.
//
// Counters only grow while a Service port exists: changes of Services and endpoints,
// full deltas and a restart of the process keep them. They restart at 0 when the
// Service port is deleted or when its rules are lost, for example because the node
// was restarted. The documentation of each backend lists other traffic that it may
// miss. The zero value has no counters.
type Traffic struct {
	// Known is the set of counters that the data plane has. All others are 0.
	Known CounterSet
	// Services holds the counters by Service port, protocol and family. Service ports
	// without traffic may be missing.
	Services map[tracker.Key]Counters
	// Unnamed holds the counters of frontends whose Service is unknown. Only
	// functions that read without a [ruleset.Backend] return any, if the kernel does not
	// store names of Services: see package ipvs.
	Unnamed map[Destination]Counters
}

// Destination is an address to which clients of a Service connect. The zero value is
// no address.
type Destination struct {
	// Addr is the address and port.
	Addr netip.AddrPort
	// Protocol is the transport protocol.
	Protocol v1.Protocol
}

// Counters holds the traffic of one Service port in one address family. The zero
// value means no traffic.
type Counters struct {
	// Connections is the number of connections sent to an endpoint. For UDP it is the
	// number of flows in connection tracking.
	Connections uint64
	// Packets and Bytes count all packets of these connections in both directions. Bytes
	// include the IP header.
	Packets, Bytes uint64
	// Refused is the number of packets refused because the Service port had no
	// endpoints. Each packet counts, including those that a client repeats.
	Refused uint64
	// Dropped is the number of packets dropped because their source was outside the
	// load balancer's source ranges, or because the Service port had no endpoints on
	// this node under a Local traffic policy. Each packet counts, including those
	// that a client repeats.
	Dropped uint64
}

// Add adds the counters of o to c.
func (c *Counters) Add(o Counters) {
	c.Connections += o.Connections
	c.Packets += o.Packets
	c.Bytes += o.Bytes
	c.Refused += o.Refused
	c.Dropped += o.Dropped
}

// CounterSet is a set of the counters in [Counters], as bits. The zero value is the
// empty set.
type CounterSet uint8

// The fields of [Counters].
const (
	CountsConnections CounterSet = 1 << iota
	CountsPackets
	CountsBytes
	CountsRefused
	CountsDropped
)

// Has reports whether s has all counters in o.
func (s CounterSet) Has(o CounterSet) bool { return s&o == o }
