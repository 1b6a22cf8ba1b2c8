package endpointslice

import (
	"net/netip"
	"slices"

	discovery "k8s.io/api/discovery/v1"
)

// Endpoint is what an EndpointSlice says of one endpoint and one port, with
// every default filled in. Its strings and slices are shared with other endpoints
// and are not those of the API object: they may be kept, and must not be written
// to.
type Endpoint struct {
	// Addr is the endpoint's first address and the port. It is of the slice's
	// family, IPv4 never in its IPv6-mapped form.
	Addr netip.AddrPort
	// Node and Zone are where it runs, "" if not known.
	Node, Zone string
	// ForNodes and ForZones are the hints, sorted and without duplicates, nil for
	// none (KEP-3015, KEP-2433).
	ForNodes, ForZones []string
	// Ready, Serving and Terminating are the conditions; an unset one counts as
	// true, true and false, as discovery/v1's EndpointConditions demands.
	Ready, Serving, Terminating bool
}

// Equal reports whether e and o say the same.
func (e *Endpoint) Equal(o *Endpoint) bool {
	return e.Addr == o.Addr &&
		e.Ready == o.Ready && e.Serving == o.Serving && e.Terminating == o.Terminating &&
		e.Node == o.Node && e.Zone == o.Zone &&
		slices.Equal(e.ForNodes, o.ForNodes) && slices.Equal(e.ForZones, o.ForZones)
}

// Plain is the [Config] of a cache of [Endpoint] values. The report function may
// be nil.
func Plain(report func(*discovery.EndpointSlice, error)) Config[Endpoint] {
	return Config[Endpoint]{
		Make: func(_ *discovery.EndpointSlice, _ *discovery.Endpoint, from *Endpoint, e *Endpoint) error {
			*e = *from
			return nil
		},
		Equal: (*Endpoint).Equal,
		Key: func(e *Endpoint) (netip.AddrPort, Rank) {
			return e.Addr, RankOf(e.Ready, e.Terminating)
		},
		Report: report,
	}
}

// Rank says which of two endpoints with the same address and port is preferred:
// the greater.
type Rank uint8

// RankOf returns the rank of an endpoint by its conditions: one that is not
// terminating before one that is, then one that is ready before one that is not.
func RankOf(ready, terminating bool) Rank {
	var r Rank
	if !terminating {
		r += 2
	}
	if ready {
		r++
	}
	return r
}
