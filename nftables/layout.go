package nftables

import (
	"fmt"
	"time"
)

// layoutVersion changes whenever a table programmed by an older version of this
// package cannot be taken over in place.
const layoutVersion = 2

// adoptableVersion is the oldest layout whose remembered clients, sticky endpoints and
// hairpin connections mean the same as in this one.
const adoptableVersion = 1

// The chains that are always there. The base chains carry the names and
// priorities that kube-proxy's nftables mode gives to those with their purpose.
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
)

// A set is one of the table's named sets and maps.
type set uint8

// The table's sets. firstAllowed and those behind it are one set for each prefix
// length that load-balancer source ranges have.
const (
	setLayout set = iota
	setServiceIPs
	setNodePorts
	setInternalIPs
	setInternalNodePorts
	setHandlers
	setInternalHandlers
	setOwnHandlers
	setEndpoints
	setStickyBuckets
	setStickyEndpoints
	setStickyClients
	setClusterIPs
	setHairpin
	setNodePortIPs
	setServiceCIDRs
	firstAllowed

	setCount = firstAllowed + 129
)

// allowed is the set of sources with prefixes of the given length.
func allowed(bits int) set { return firstAllowed + set(bits) }

// name returns the set's name in the table.
func (s set) name() string {
	if s >= firstAllowed {
		return fmt.Sprintf("allowed-sources-%d", s-firstAllowed)
	}
	return [...]string{
		setLayout:            "layout",
		setServiceIPs:        "service-ips",
		setNodePorts:         "service-nodeports",
		setInternalIPs:       "internal-service-ips",
		setInternalNodePorts: "internal-service-nodeports",
		setHandlers:          "handlers",
		setInternalHandlers:  "internal-handlers",
		setOwnHandlers:       "own-handlers",
		setEndpoints:         "endpoints",
		setStickyBuckets:     "sticky-buckets",
		setStickyEndpoints:   "sticky-endpoints",
		setStickyClients:     "sticky-clients",
		setClusterIPs:        "cluster-ips",
		setHairpin:           "hairpin-connections",
		setNodePortIPs:       "nodeport-ips",
		setServiceCIDRs:      "service-cidrs",
	}[s]
}

// What a frontend's map element holds, and the rules keep in the packet's
// priority between two look-ups, is a dispatch key: 32 bits that say what is to be
// done with the connection. The priority is used because it is the one field of
// a packet that rules can write, read and look up, and that nobody relies on at
// this point: nft cannot list a rule that passes a looked-up value on in a
// register. It is put back before the packet leaves (see restore in rules.go).
//
//	bit 31      always set, so that a rule can tell a dispatch key from a priority
//	bits 20-30  the handler: which chain handles it
//	bits 0-19   the number of the pool
//
// A sticky pool's number is 16 bits with the highest set; its chain shifts it up,
// which again has bit 31 set, and makes room for the number of an endpoint in the
// lower half.
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
	// maxStickyEndpoints is how many endpoints a Service with client affinity can
	// have.
	maxStickyEndpoints = 1<<stickyShift - 1
)

func dispatchKey(handler, pool uint32) uint32 { return dispatchMark | handler<<handlerShift | pool }

// bucketsFor returns the number of buckets that a pool of n endpoints draws from: n
// itself up to 16 and then the next of four steps between powers of two, so that
// the number of chains stays small however many sizes there are. A draw that
// hits none of the n is repeated.
func bucketsFor(n int) int {
	if n <= exactBuckets {
		return n
	}
	step := exactBuckets / 4
	for n > 8*step {
		step *= 2
	}
	return (n + step - 1) / step * step
}

// bucketsBelow returns the largest number of buckets less than that of a pool whose
// bucketsFor is buckets: a pool has at least one endpoint more than that.
func bucketsBelow(buckets int) int {
	if buckets <= exactBuckets+1 {
		return buckets - 1
	}
	step := exactBuckets / 4
	for buckets > 8*step {
		step *= 2
	}
	return buckets - step
}

const exactBuckets = 16

// seconds is how an affinity timeout is written in a chain's name and in a rule:
// the kernel would do with milliseconds, Kubernetes has only seconds.
//
// Kubernetes has at most a day (v1.ClientIPConfig.TimeoutSeconds); maxAffinity is
// one whose name is no shorter.
func seconds(d time.Duration) int64 { return int64((d + time.Second - 1) / time.Second) }

const maxAffinity = 86400 * time.Second
