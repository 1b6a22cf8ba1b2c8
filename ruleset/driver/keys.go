package driver

import (
	"iter"
	"net/netip"

	v1 "k8s.io/api/core/v1"

	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/tracker"
)

// Endpoint is a key for an endpoint that Services share.
type Endpoint struct {
	// Addr is the endpoint's address and port.
	Addr netip.AddrPort
	// Protocol is the protocol of the Service port.
	Protocol v1.Protocol
}

// EndpointOf returns the Endpoint for an endpoint of s.
func EndpointOf(s *ruleset.Port, ep *tracker.Endpoint) Endpoint {
	return Endpoint{ep.Addr, s.Key.Protocol}
}

// Pool is a key for a pool of a Service port.
type Pool struct {
	// Service is the key of the Service port, in one family.
	Service tracker.Key
	// Target is [ruleset.TargetCluster] or [ruleset.TargetLocal].
	Target ruleset.Target
}

// Pools yields the pools of s with their endpoints. If empty is set, these include pools that exist without
// endpoints.
func Pools(s *ruleset.Port, empty bool) iter.Seq2[Pool, []*tracker.Endpoint] {
	return func(yield func(Pool, []*tracker.Endpoint) bool) {
		for _, t := range [...]ruleset.Target{ruleset.TargetCluster, ruleset.TargetLocal} {
			if s.HasPool(t) && (empty || len(s.Pool(t)) != 0) && !yield(Pool{s.Key, t}, s.Pool(t)) {
				return
			}
		}
	}
}

// Frontend is a key for a frontend.
type Frontend struct {
	// Service is the zero Key, so that the entry of a new owner replaces that of the old one. A
	// data plane whose entries contain the Service sets it.
	Service tracker.Key
	// Addr is the destination address, or the zero Addr for a NodePort.
	Addr netip.Addr
	// Port is the destination port.
	Port uint16
	// Protocol is the protocol of the Service port.
	Protocol v1.Protocol
	// Family is the address family. It distinguishes NodePorts.
	Family tracker.Family
}

// Frontends yields the frontends of s with their keys.
func Frontends(s *ruleset.Port) iter.Seq2[Frontend, *ruleset.Frontend] {
	return func(yield func(Frontend, *ruleset.Frontend) bool) {
		for i := range s.Frontends {
			f := &s.Frontends[i]
			if !yield(Frontend{Addr: f.Addr, Port: f.Port, Protocol: s.Key.Protocol, Family: s.Key.Family}, f) {
				return
			}
		}
	}
}

// Place returns f without the Service, for [Table].Place.
func (f Frontend) Place() any {
	f.Service = tracker.Key{}
	return f
}
