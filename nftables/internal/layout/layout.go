package layout

import (
	"fmt"

	v1 "k8s.io/api/core/v1"
)

// Version increases whenever this package cannot rewrite a table of an earlier
// version in place.
const Version = 4

// OldestVersion is the oldest layout whose remembered clients, sticky endpoints and
// hairpin connections have the same meaning as in this one.
const OldestVersion = 1

// The chains that every table has. Base chains have the names and priorities of the chains with
// the same purpose in kube-proxy's nftables mode.
const (
	ChainNATPrerouting   = "nat-prerouting"
	ChainNATOutput       = "nat-output"
	ChainPreroutingAgain = "nat-prerouting-again"
	ChainOutputAgain     = "nat-output-again"
	ChainNATPostrouting  = "nat-postrouting"
	ChainFilterForward   = "filter-forward"
	ChainFilterInput     = "filter-input"
	ChainFilterOutput    = "filter-output"

	ChainServices         = "services"
	ChainNodePorts        = "nodeports"
	ChainInternal         = "internal"
	ChainFirewallCheck    = "firewall-check"
	ChainClusterIPs       = "cluster-ips-check"
	ChainMasquerading     = "masquerading"
	ChainNoEndpoints      = "no-endpoints"
	ChainNoLocalEndpoints = "no-local-endpoints"
	ChainOwnServices      = "own-services"
	ChainOwnNodePorts     = "own-nodeports"
	// The chains of sticky pools exist once a Service has client affinity.
	ChainSticky        = "sticky"
	ChainStickyRecall  = "sticky-recall"
	ChainStickySend    = "sticky-send"
	ChainStickyConfirm = "sticky-confirm"
	// ChainToFastPath exists with Config.Offload.
	ChainToFastPath = "to-fast-path"
)

// A Set is one of the table's named sets and maps.
type Set uint8

// The table's sets. FastPathInterfaces exists with Config.Offload. From FirstAllowed on, there is one set for each prefix length of load-balancer source ranges.
const (
	VersionSet Set = iota
	ServiceIPs
	NodePorts
	InternalIPs
	InternalNodePorts
	Handlers
	InternalHandlers
	OwnHandlers
	StickyHandlers
	Endpoints // of TCP
	UDPEndpoints
	SCTPEndpoints
	StickyPools
	StickyBuckets
	StickyEndpoints
	StickyClients
	ClusterIPs
	Hairpin
	NodePortIPs
	ServiceCIDRs
	FastPathInterfaces
	Connections
	Refused
	Dropped
	FirstAllowed

	SetCount = FirstAllowed + 129
)

// EndpointsOf returns the map of the endpoints of a protocol's pools without client affinity. Each protocol has a
// map, because the nft tool wants the port in the type of the rule's map to be of the rule's protocol.
func EndpointsOf(p v1.Protocol) Set {
	switch p {
	case v1.ProtocolUDP:
		return UDPEndpoints
	case v1.ProtocolSCTP:
		return SCTPEndpoints
	}
	return Endpoints
}

// Name returns the set's name in the table.
func (s Set) Name() string {
	if s >= FirstAllowed {
		return fmt.Sprintf("allowed-sources-%d", s-FirstAllowed)
	}
	return [...]string{
		VersionSet:         "layout",
		ServiceIPs:         "service-ips",
		NodePorts:          "service-nodeports",
		InternalIPs:        "internal-service-ips",
		InternalNodePorts:  "internal-service-nodeports",
		Handlers:           "handlers",
		InternalHandlers:   "internal-handlers",
		OwnHandlers:        "own-handlers",
		StickyHandlers:     "sticky-handlers",
		Endpoints:          "tcp-endpoints",
		UDPEndpoints:       "udp-endpoints",
		SCTPEndpoints:      "sctp-endpoints",
		StickyPools:        "sticky-pools",
		StickyBuckets:      "sticky-buckets",
		StickyEndpoints:    "sticky-endpoints",
		StickyClients:      "sticky-clients",
		ClusterIPs:         "cluster-ips",
		Hairpin:            "hairpin-connections",
		NodePortIPs:        "nodeport-ips",
		ServiceCIDRs:       "service-cidrs",
		FastPathInterfaces: "fast-path-interfaces",
		Connections:        "connections",
		Refused:            "refused-packets",
		Dropped:            "dropped-packets",
	}[s]
}

// The value of a frontend's element is a dispatch key: 32 bits that determine what happens to the connection. Rules
// keep it in the packet's priority between two look-ups, and reset the priority before the packet leaves (see
// resetPriority). The priority is the one field of a packet that rules can write, read and look up, and that nothing
// else uses at this point. nft cannot list a rule that passes a looked-up value on in a register.
//
//	bit 31      always set, so that a rule can distinguish a dispatch key from a priority
//	bits 20-30  the handler's number
//	bits 0-19   the pool's number
//
// A sticky pool's number has 16 bits, the highest of which is set. The map sticky-pools replaces its dispatch key by
// a sticky key: the pool's number in the upper half, which sets bit 31 again, and the number of a sticky handler in
// the lower half, which the sticky handler's chain replaces by the number of an endpoint.
const (
	DispatchMark = 1 << 31
	HandlerShift = 20
	MaxHandler   = 1<<11 - 1
	HandlerMask  = DispatchMark | MaxHandler<<HandlerShift
	MaxPool      = 1<<HandlerShift - 1
	PoolMask     = MaxPool
	StickyMark   = 1 << 15
	MaxSticky    = StickyMark - 1
	StickyShift  = 16
	StickyMask   = 0xffff << StickyShift
	MaxMember    = 1<<StickyShift - 1
	// MaxStickyHandlers is the largest number of sticky handlers: twice that of sticky pools, because one transaction
	// may change the handler of each.
	MaxStickyHandlers = 1<<StickyShift - 1
	// MaxStickyEndpoints is the largest number of endpoints of a Service with client affinity.
	MaxStickyEndpoints = MaxMember
)

// DispatchKey returns the dispatch key of a handler and a pool.
func DispatchKey(handler, pool uint32) uint32 { return DispatchMark | handler<<HandlerShift | pool }

// StickyKey returns a sticky pool's element of the map sticky-pools.
func StickyKey(handler, pool uint32) uint32 { return pool<<StickyShift | handler }
