package driver

import (
	"iter"
	"net/netip"

	v1 "k8s.io/api/core/v1"

	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/tracker"
)

// Tables is the data plane of a [Driver]. E is the value of an endpoint, P of a pool, and F of
// a frontend. A Driver calls the functions from one goroutine at a time, within Apply. It
// stores values, so they must not be modified. A value must be equal for equal Services, except
// that Frontend may depend on what Pools has stored.
type Tables[E, P, F any] struct {
	// Limits are the limits of the data plane, in both families.
	Limits ruleset.Limits
	// Node writes what depends on the node. It is called if the node changed and in each
	// full delta that is no [ruleset.Delta].Repeat, before anything else is written. It
	// may be nil. Its error fails the whole delta. If values of unchanged Services depend on
	// what changed, it returns [ruleset.ErrNeedFull]: the same Sync then offers all Services,
	// and calls Node again.
	Node func(*ruleset.Node) error
	// Refuse, if not nil, returns an error for a Service that the data plane cannot have. It
	// is called before anything is written. The Service then stays as it is: see
	// [ruleset.ErrRefused].
	Refuse func(*ruleset.Port) error

	// Endpoints is the table of endpoints that pools refer to. Services share an entry: it
	// is put before the first pool that needs it and deleted after the last one. If the values
	// of the Services differ, one of them counts.
	Endpoints Table[Endpoint, E]
	// Addresses is the table of the addresses of frontends, for example routes to them.
	// Services share an entry, as in Endpoints.
	Addresses Table[netip.Addr, struct{}]
	// Pools is the table of the pools that frontends refer to.
	Pools Table[Pool, P]
	// Frontends is the table of frontends.
	Frontends Table[Frontend, F]

	// Endpoint returns the wanted value of an endpoint. Nil means the zero value.
	Endpoint func(*ruleset.Port, *tracker.Endpoint) E
	// Pool returns the wanted value of a pool. It is required with Pools. For a P of
	// []*tracker.Endpoint it is (*ruleset.Port).Pool, which allocates nothing.
	Pool func(*ruleset.Port, ruleset.Target) P
	// Frontend returns the wanted value of a frontend. It is required with Frontends. It
	// is called after the pools of the Service have been put, and again after a pool has
	// become empty. So it may return what Pools stored, such as a number or a size. If
	// the pools are unchanged, it must return an equal value for the same Service.
	Frontend func(*ruleset.Port, *ruleset.Frontend) F

	// HasAddress reports whether a frontend's address is in Addresses. Nil means every
	// frontend with an address.
	HasAddress func(*ruleset.Port, *ruleset.Frontend) bool
	// HasFrontend reports whether a frontend is in Frontends. Nil means every frontend.
	HasFrontend func(*ruleset.Port, *ruleset.Frontend) bool
	// EmptyPools means that a pool that exists has an entry even if it is empty
	// ([ruleset.Port.HasPool]). Otherwise only pools with endpoints have one. A new
	// empty pool is put before the frontends, and an existing pool becomes empty after
	// them.
	EmptyPools bool
	// ByService means that the key of a frontend contains its Service, so that two
	// Services may have entries for one address. If it is false, [Frontend].Service is the
	// zero Key, and the entry of a new owner replaces that of the old one.
	ByService bool
}

// Endpoint identifies an endpoint that Services share.
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

// Pool identifies a pool of a Service port.
type Pool struct {
	// Service is the key of the Service port, in one family.
	Service tracker.Key
	// Target is [ruleset.TargetCluster] or [ruleset.TargetLocal].
	Target ruleset.Target
}

// Frontend identifies a frontend.
type Frontend struct {
	// Service is the key of the Service port if [Tables].ByService is set.
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

// frontend returns the key of a frontend of the Service with key k.
func (p *Tables[E, P, F]) frontend(k tracker.Key, f *ruleset.Frontend) Frontend {
	out := Frontend{Addr: f.Addr, Port: f.Port, Protocol: k.Protocol, Family: k.Family}
	if p.ByService {
		out.Service = k
	}
	return out
}

var targets = [...]ruleset.Target{ruleset.TargetCluster, ruleset.TargetLocal}

// hasPool reports whether a pool of s must have an entry. s may be nil.
func (p *Tables[E, P, F]) hasPool(s *ruleset.Port, t ruleset.Target) bool {
	if p.EmptyPools {
		return s.HasPool(t)
	}
	return s != nil && len(s.Pool(t)) != 0
}

// hasFrontend reports whether a frontend of s must have an entry.
func (p *Tables[E, P, F]) hasFrontend(s *ruleset.Port, f *ruleset.Frontend) bool {
	return p.Frontends.exists() && (p.HasFrontend == nil || p.HasFrontend(s, f))
}

// addresses yields the addresses of a Service that have an entry. s may be nil.
func (p *Tables[E, P, F]) addresses(s *ruleset.Port) iter.Seq2[netip.Addr, struct{}] {
	return func(yield func(netip.Addr, struct{}) bool) {
		if s == nil {
			return
		}
		for i := range s.Frontends {
			f := &s.Frontends[i]
			if f.Addr.IsValid() && (p.HasAddress == nil || p.HasAddress(s, f)) && !yield(f.Addr, struct{}{}) {
				return
			}
		}
	}
}

// upserted yields the endpoints that a change adds or modifies.
func (p *Tables[E, P, F]) upserted(c *ruleset.Change) iter.Seq2[Endpoint, E] {
	return func(yield func(Endpoint, E) bool) {
		for ep := range c.Upserted() {
			var v E
			if p.Endpoint != nil {
				v = p.Endpoint(c.New, ep)
			}
			if !yield(EndpointOf(c.New, ep), v) {
				return
			}
		}
	}
}

// removed yields the endpoints that a change removes.
func removed(c *ruleset.Change) iter.Seq[Endpoint] {
	return func(yield func(Endpoint) bool) {
		for ep := range c.Removed() {
			if !yield(Endpoint{ep.Addr, c.Key.Protocol}) {
				return
			}
		}
	}
}
