package endpointslice

import (
	"net/netip"
	"slices"

	discovery "k8s.io/api/discovery/v1"
)

// Endpoint is one endpoint of an EndpointSlice with one port and all defaults filled in. Endpoints share strings and
// slices, but none of the API object's. They may be kept and must not be modified.
type Endpoint struct {
	// Addr is the endpoint's first address, in the slice's family and never an IPv4-mapped IPv6 address, and the
	// port.
	Addr netip.AddrPort
	// Node and Zone are the names of the endpoint's node and zone, or "" if unknown.
	Node, Zone string
	// ForNodes and ForZones are the hints, sorted and without duplicates, or nil for
	// none (KEP-3015, KEP-2433).
	ForNodes, ForZones []string
	// Ready, Serving and Terminating are the conditions. Unset conditions count as
	// true, true and false, as EndpointConditions of discovery/v1 specifies.
	Ready, Serving, Terminating bool
}

// Equal reports whether all fields of e and o are equal.
func (e *Endpoint) Equal(o *Endpoint) bool {
	return e.Addr == o.Addr &&
		e.Ready == o.Ready && e.Serving == o.Serving && e.Terminating == o.Terminating &&
		e.Node == o.Node && e.Zone == o.Zone &&
		slices.Equal(e.ForNodes, o.ForNodes) && slices.Equal(e.ForZones, o.ForZones)
}

// Plain returns the [Config] of a cache of [Endpoint] values. report becomes
// Config.Report and may be nil.
func Plain(report func(*discovery.EndpointSlice, []LeftOut)) Config[Endpoint] {
	return Config[Endpoint]{
		Make: func(_ *discovery.EndpointSlice, _ *discovery.Endpoint, from *Endpoint, e *Endpoint) error {
			*e = *from
			return nil
		},
		Equal: (*Endpoint).Equal,
		Key: func(e *Endpoint) (netip.AddrPort, Rank) {
			return e.Addr, e.rank()
		},
		Report: report,
	}
}

// Rank orders endpoints with the same address and port. The cache keeps that with the greatest.
type Rank uint8

func (e *Endpoint) rank() Rank {
	return Conditions{Ready: e.Ready, Terminating: e.Terminating, OnNode: e.Node != ""}.Rank()
}

// Conditions are the conditions of an endpoint that determine its rank.
type Conditions struct {
	// Ready and Terminating are those of discovery/v1 EndpointConditions.
	Ready, Terminating bool
	// OnNode reports whether the endpoint's node is known.
	OnNode bool
}

// Rank returns the rank of an endpoint with these conditions. Endpoints that are not terminating rank highest, then
// ready ones, then those with a known node, so that a node recognizes its own endpoint.
func (c Conditions) Rank() Rank {
	var r Rank
	if !c.Terminating {
		r += 4
	}
	if c.Ready {
		r += 2
	}
	if c.OnNode {
		r++
	}
	return r
}
