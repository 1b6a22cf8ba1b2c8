package layout

import (
	"fmt"
	"math"
	"time"

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
	// The chains of ranges of ports exist once a frontend has one.
	ChainRanges             = "ranges"
	ChainInternalRanges     = "internal-ranges"
	ChainOwnRanges          = "own-ranges"
	ChainRangeFirewallCheck = "range-firewall-check"
	ChainRangeStickySend    = "range-sticky-send"
	ChainRangeStickyConfirm = "range-sticky-confirm"
	// ChainToFastPath exists with Config.Offload.
	ChainToFastPath = "to-fast-path"
)

// LeadsToRanges reports whether a chain leads to the ranges of ports while there are any. Its rules
// are replaced when the first range comes and when the last one goes.
func LeadsToRanges(chain string) bool {
	return chain == ChainServices || chain == ChainNodePorts || chain == ChainOwnServices
}

// A Set is one of the table's named sets and maps.
type Set uint8

// The table's sets. FastPathInterfaces exists with Config.Offload, and the sets from
// FirstOfRanges to LastOfRanges exist once a frontend has a range of ports. From FirstAllowed on,
// there is one set for each prefix length of load-balancer source ranges.
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
	ServiceRanges
	RangeKeys
	InternalRangeKeys
	RangeStickyHandlers
	RangeSources
	ShiftFrom
	ShiftTo
	FirstAllowed

	FirstOfRanges = ServiceRanges
	LastOfRanges  = ShiftTo

	SetCount = FirstAllowed + 129

	// Packets is the set of the table that counts packets, which has no other set.
	Packets = SetCount
)

// The chains of the table that counts packets.
const (
	ChainPackets    = "count"
	ChainPacketsIn  = "count-input"
	ChainPacketsOut = "count-postrouting"
)

// MaxPackets is the largest number of destinations whose packets are counted, in each family.
const MaxPackets = 1 << 20

// EndpointsOf returns the map of the endpoints of a protocol's pools without client affinity. Each
// protocol has a map, because the nft tool loads a rule that translates a port only if it names the
// protocol, and the port in the type of the rule's map must be of the same protocol.
func EndpointsOf(p v1.Protocol) Set {
	switch p {
	case v1.ProtocolUDP:
		return UDPEndpoints
	case v1.ProtocolSCTP:
		return SCTPEndpoints
	}
	return Endpoints
}

// Allowed returns the set of sources with prefixes of the given length.
func Allowed(bits int) Set { return FirstAllowed + Set(bits) }

// Name returns the set's name in the table.
func (s Set) Name() string {
	if s == Packets {
		return "packets"
	}
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

		ServiceRanges:       "service-ranges",
		RangeKeys:           "range-keys",
		InternalRangeKeys:   "internal-range-keys",
		RangeStickyHandlers: "range-sticky-handlers",
		RangeSources:        "range-allowed-sources",
		ShiftFrom:           "shift-from",
		ShiftTo:             "shift-to",
	}[s]
}

// The value of a frontend's element is a dispatch key: 32 bits that determine what happens to the
// connection. Rules keep it in the packet's priority between two look-ups, and reset the priority
// before the packet leaves (see resetPriority). The priority is the one field of a packet that
// rules can write, read and look up, and that nothing else uses at this point. A register would
// do, but nft cannot list a rule that passes a looked-up value on in a register.
//
//	bit 31      always set, so that a rule can distinguish a dispatch key from a priority
//	bits 20-30  the handler's number
//	bits 0-19   the pool's number
//
// A sticky pool's number has 16 bits, the highest of which is set. The map sticky-pools replaces
// the dispatch key of a sticky pool by a sticky key: the pool's number in the upper half, which
// sets bit 31 again, and the number of a sticky handler in the lower half. The sticky handler's
// chain replaces that half by the number of an endpoint.
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
	// MaxStickyHandlers is the largest number of sticky handlers. It is twice the number of
	// sticky pools, so that there is room even if one transaction changes the handler of each.
	MaxStickyHandlers = 1<<StickyShift - 1
	// MaxStickyEndpoints is the largest number of endpoints of a Service with client affinity.
	MaxStickyEndpoints = MaxMember
)

// A range of ports has a number, which the map service-ranges holds with bit 31 set. The maps
// range-keys and internal-range-keys replace it by a dispatch key. So the elements of
// service-ranges change only if the range does: the kernel makes new elements of a set of ranges
// visible a moment after the rest of a transaction, and copies the whole set for each change.
const MaxRange = MaxPool

// ShiftedBy returns the ports from and to by which the kernel turns port p of a range into target
// + p - first: it computes from + p modulo (to - from + 1) (net/netfilter/nf_nat_core.c,
// NF_NAT_RANGE_PROTO_OFFSET with the base 0). There are such ports for every shift upwards. A
// range that is shifted downwards may have none if it is long: then ok is false.
func ShiftedBy(first, last, target uint16) (from, to uint16, ok bool) {
	// No port may be less than the modulus while another is not.
	for modulus := int(last) - int(first) + 1; modulus <= math.MaxUint16+1; modulus++ {
		begin := int(first) % modulus
		from := int(target) - begin
		if begin+int(last-first) < modulus && from >= 0 && from+modulus-1 <= math.MaxUint16 {
			return uint16(from), uint16(from + modulus - 1), true
		}
	}
	return 0, 0, false
}

// Shifted returns what the kernel makes of a port of a range that is shifted by the ports from
// and to.
func Shifted(from, to, port uint16) uint16 {
	return uint16(int(from) + int(port)%(int(to)-int(from)+1))
}

// RangeKey returns the value of a range of ports in the map service-ranges.
func RangeKey(number uint32) uint32 { return DispatchMark | number }

// DispatchKey returns the dispatch key of a handler and a pool.
func DispatchKey(handler, pool uint32) uint32 { return DispatchMark | handler<<HandlerShift | pool }

// StickyKey returns a sticky pool's element of the map sticky-pools.
func StickyKey(handler, pool uint32) uint32 { return pool<<StickyShift | handler }

// ExactBuckets is the largest number of endpoints up to which every pool has as many buckets
// as endpoints.
const ExactBuckets = 16

// bucketStep returns the difference between the numbers of buckets around n.
func bucketStep(n int) int {
	step := ExactBuckets / 4
	for n > 8*step {
		step *= 2
	}
	return step
}

// BucketsFor returns the number of buckets that a pool of n endpoints draws from: n itself up
// to 16, and then the next of four steps between powers of two. So there are few chains for many
// sizes of pools. After a draw of an empty bucket, the next rule draws again.
func BucketsFor(n int) int {
	if n <= ExactBuckets {
		return n
	}
	step := bucketStep(n)
	return (n + step - 1) / step * step
}

// BucketsBelow returns the next smaller number of buckets. A pool that draws from the given
// number has more endpoints than the result.
func BucketsBelow(buckets int) int {
	if buckets <= ExactBuckets+1 {
		return buckets - 1
	}
	return buckets - bucketStep(buckets)
}

// Seconds rounds an affinity timeout up to seconds, as in the names of chains and in rules. The
// kernel has a resolution of milliseconds, but Kubernetes of seconds.
func Seconds(d time.Duration) int64 { return int64((d + time.Second - 1) / time.Second) }
