package driver

import (
	"iter"
	"net/netip"

	v1 "k8s.io/api/core/v1"

	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/tracker"
)

// Plane is the data plane of a [Driver]. P is the value of a pool and F the value of a
// frontend. A Table without Put does not exist in the data plane. A Driver calls the
// functions from one goroutine at a time, within Apply.
type Plane[P, F any] struct {
	// Node writes what depends on the node. It is called if the node changed and in each
	// full delta that is no [ruleset.Delta].Repeat, before anything else is written. It
	// may be nil. Its error fails the whole delta.
	Node func(*ruleset.Node) error

	// Endpoints is the table of endpoints that pools refer to. Services share an entry: it
	// is put before the first pool that needs it and deleted after the last one.
	Endpoints Table[Endpoint, struct{}]
	// Addresses is the table of the addresses of frontends, for example routes to them.
	// Services share an entry, as in Endpoints.
	Addresses Table[netip.Addr, struct{}]
	// Pools is the table of the pools that frontends refer to.
	Pools Table[Pool, P]
	// Frontends is the table of frontends.
	Frontends Table[Frontend, F]

	// Pool returns the wanted value of a pool. It is required with Pools. It must return
	// an equal value for the same Service. The Driver stores values, so they must not be
	// modified.
	Pool func(*ruleset.Service, ruleset.Target) P
	// Frontend returns the wanted value of a frontend. It is required with Frontends. It
	// is called after the pools of the Service have been put, and again after a pool has
	// become empty. So it may return what Pools stored, such as a number or a size. If
	// the pools are unchanged, it must return an equal value for the same Service.
	Frontend func(*ruleset.Service, *ruleset.Frontend) F
	// EqualPools and EqualFrontends compare values. Nil means reflect.DeepEqual.
	EqualPools     func(a, b P) bool
	EqualFrontends func(a, b F) bool

	// HasAddress reports whether a frontend's address is in Addresses. Nil means every
	// frontend with an address.
	HasAddress func(*ruleset.Frontend) bool
	// EmptyPools means that a pool that exists has an entry even if it is empty
	// ([ruleset.Service.HasPool]). Otherwise only pools with endpoints have one. A new
	// empty pool is put before the frontends, and an existing pool becomes empty after
	// them.
	EmptyPools bool
	// Trim, if not nil, is called after the frontends have been written for each pool that
	// was put before. A plane whose Put must leave what earlier frontends may use deletes
	// it there.
	Trim func(Pool) error
	// ByService means that the key of a frontend contains its Service, so that two
	// Services may have entries for one address. If it is false, [Frontend].Service is the
	// zero Key, and the entry of a new owner replaces that of the old one.
	ByService bool
}

// Table is a table of the data plane.
type Table[K comparable, V any] struct {
	// Installed yields the entries that the data plane has, including those of an earlier
	// process. The Driver reads all of them before it writes. Nil means that only the
	// Driver's own entries exist; then a full delta writes every entry, unless it is a
	// [ruleset.Delta].Repeat.
	Installed func() (iter.Seq2[K, V], error)
	// Put adds or replaces an entry. After an error, the state of the entry is unknown.
	Put func(K, V) error
	// Delete removes an entry. Deleting a missing entry is not an error. It is required
	// with Put.
	Delete func(K) error
}

// Endpoint identifies an endpoint that Services share.
type Endpoint struct {
	// Addr is the endpoint's address and port.
	Addr netip.AddrPort
	// Protocol is the protocol of the Service port.
	Protocol v1.Protocol
}

// EndpointOf returns the Endpoint for an endpoint of s.
func EndpointOf(s *ruleset.Service, ep *tracker.Endpoint) Endpoint {
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
	// Service is the key of the Service port if [Plane].ByService is set.
	Service tracker.Key
	// Addr is the destination address, or the zero Addr for a NodePort.
	Addr netip.Addr
	// Port is the destination port, and the first one if LastPort is not 0.
	Port uint16
	// LastPort is the last destination port of a range, or 0 for a single port. A single port
	// within the range, perhaps of another Service, is a frontend of its own and comes first
	// ([ruleset.Frontend].LastPort).
	LastPort uint16
	// Protocol is the protocol of the Service port.
	Protocol v1.Protocol
	// Family is the address family. It distinguishes NodePorts.
	Family tracker.Family
}

// frontend returns the key of a frontend of the Service with key k.
func (p *Plane[P, F]) frontend(k tracker.Key, f *ruleset.Frontend) Frontend {
	out := Frontend{Addr: f.Addr, Port: f.Port, LastPort: f.LastPort, Protocol: k.Protocol, Family: k.Family}
	if p.ByService {
		out.Service = k
	}
	return out
}

var targets = [...]ruleset.Target{ruleset.TargetCluster, ruleset.TargetLocal}

// has reports whether a pool of s must have an entry. s may be nil.
func (p *Plane[P, F]) has(s *ruleset.Service, t ruleset.Target) bool {
	if p.EmptyPools {
		return s.HasPool(t)
	}
	return s != nil && len(s.Pool(t)) != 0
}
