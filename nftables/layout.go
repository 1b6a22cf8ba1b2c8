package nftables

import (
	"fmt"
	"time"
)

// layoutVersion increases whenever this package cannot rewrite a table of an earlier
// version in place.
const layoutVersion = 4

// adoptableVersion is the oldest layout whose remembered clients, sticky endpoints and
// hairpin connections have the same meaning as in this one.
const adoptableVersion = 1

// The chains that every table has. Base chains have the names and priorities of the chains with
// the same purpose in kube-proxy's nftables mode.
const (
	chainNATPrerouting   = "nat-prerouting"
	chainNATOutput       = "nat-output"
	chainPreroutingAgain = "nat-prerouting-again"
	chainOutputAgain     = "nat-output-again"
	chainNATPostrouting  = "nat-postrouting"
	chainFilterForward   = "filter-forward"
	chainFilterInput     = "filter-input"
	chainFilterOutput    = "filter-output"

	chainServices         = "services"
	chainNodePorts        = "nodeports"
	chainInternal         = "internal"
	chainFirewallCheck    = "firewall-check"
	chainClusterIPs       = "cluster-ips-check"
	chainMasquerading     = "masquerading"
	chainNoEndpoints      = "no-endpoints"
	chainNoLocalEndpoints = "no-local-endpoints"
	chainOwnServices      = "own-services"
	chainOwnNodePorts     = "own-nodeports"
	// The chains of sticky pools exist once a Service has client affinity.
	chainSticky        = "sticky"
	chainStickyRecall  = "sticky-recall"
	chainStickySend    = "sticky-send"
	chainStickyConfirm = "sticky-confirm"
	// chainToFastPath exists with Config.Offload.
	chainToFastPath = "to-fast-path"
)

// A set is one of the table's named sets and maps.
type set uint8

// The table's sets. setFastPathInterfaces exists with Config.Offload. From firstAllowed on, there
// is one set for each prefix length of load-balancer source ranges.
const (
	setLayout set = iota
	setServiceIPs
	setNodePorts
	setInternalIPs
	setInternalNodePorts
	setHandlers
	setInternalHandlers
	setOwnHandlers
	setStickyHandlers
	setEndpoints
	setStickyPools
	setStickyBuckets
	setStickyEndpoints
	setStickyClients
	setClusterIPs
	setHairpin
	setNodePortIPs
	setServiceCIDRs
	setFastPathInterfaces
	setConnections
	setRefused
	setDropped
	firstAllowed

	setCount = firstAllowed + 129
)

// allowed returns the set of sources with prefixes of the given length.
func allowed(bits int) set { return firstAllowed + set(bits) }

// name returns the set's name in the table.
func (s set) name() string {
	if s >= firstAllowed {
		return fmt.Sprintf("allowed-sources-%d", s-firstAllowed)
	}
	return [...]string{
		setLayout:             "layout",
		setServiceIPs:         "service-ips",
		setNodePorts:          "service-nodeports",
		setInternalIPs:        "internal-service-ips",
		setInternalNodePorts:  "internal-service-nodeports",
		setHandlers:           "handlers",
		setInternalHandlers:   "internal-handlers",
		setOwnHandlers:        "own-handlers",
		setStickyHandlers:     "sticky-handlers",
		setEndpoints:          "endpoints",
		setStickyPools:        "sticky-pools",
		setStickyBuckets:      "sticky-buckets",
		setStickyEndpoints:    "sticky-endpoints",
		setStickyClients:      "sticky-clients",
		setClusterIPs:         "cluster-ips",
		setHairpin:            "hairpin-connections",
		setNodePortIPs:        "nodeport-ips",
		setServiceCIDRs:       "service-cidrs",
		setFastPathInterfaces: "fast-path-interfaces",
		setConnections:        "connections",
		setRefused:            "refused-packets",
		setDropped:            "dropped-packets",
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
	dispatchMark = 1 << 31
	handlerShift = 20
	maxHandler   = 1<<11 - 1
	handlerMask  = dispatchMark | maxHandler<<handlerShift
	maxPool      = 1<<handlerShift - 1
	poolMask     = maxPool
	stickyMark   = 1 << 15
	maxSticky    = stickyMark - 1
	stickyShift  = 16
	stickyMask   = 0xffff << stickyShift
	maxMember    = 1<<stickyShift - 1
	// maxStickyHandlers is the largest number of sticky handlers. It is twice the number of
	// sticky pools, so that there is room even if one transaction changes the handler of each.
	maxStickyHandlers = 1<<stickyShift - 1
	// maxStickyEndpoints is the largest number of endpoints of a Service with client affinity.
	maxStickyEndpoints = maxMember
)

func dispatchKey(handler, pool uint32) uint32 { return dispatchMark | handler<<handlerShift | pool }

// stickyKey returns a sticky pool's element of the map sticky-pools.
func stickyKey(handler, pool uint32) uint32 { return pool<<stickyShift | handler }

// exactBuckets is the largest number of endpoints up to which every pool has as many buckets
// as endpoints.
const exactBuckets = 16

// bucketStep returns the difference between the numbers of buckets around n.
func bucketStep(n int) int {
	step := exactBuckets / 4
	for n > 8*step {
		step *= 2
	}
	return step
}

// bucketsFor returns the number of buckets that a pool of n endpoints draws from: n itself up
// to 16, and then the next of four steps between powers of two. So there are few chains for many
// sizes of pools. After a draw of an empty bucket, the next rule draws again.
func bucketsFor(n int) int {
	if n <= exactBuckets {
		return n
	}
	step := bucketStep(n)
	return (n + step - 1) / step * step
}

// bucketsBelow returns the next smaller number of buckets. A pool that draws from the given
// number has more endpoints than the result.
func bucketsBelow(buckets int) int {
	if buckets <= exactBuckets+1 {
		return buckets - 1
	}
	return buckets - bucketStep(buckets)
}

// seconds rounds an affinity timeout up to seconds, as in the names of chains and in rules. The
// kernel has a resolution of milliseconds, but Kubernetes of seconds.
func seconds(d time.Duration) int64 { return int64((d + time.Second - 1) / time.Second) }
