//go:build linux

package ipvs

import "slices"

// Scheduler is how a virtual server chooses among its real servers: the name of a
// kernel module without "ip_vs_" (ipvsadm(8), --scheduler).
type Scheduler string

// The schedulers of Linux. The kernel loads their modules when they are first
// used.
const (
	// RoundRobin takes one after the other, whatever their weights.
	RoundRobin Scheduler = "rr"
	// WeightedRoundRobin does so in proportion to the weights.
	WeightedRoundRobin Scheduler = "wrr"
	// LeastConnection takes the one with the fewest connections.
	LeastConnection Scheduler = "lc"
	// WeightedLeastConnection takes the one with the fewest for its weight.
	WeightedLeastConnection Scheduler = "wlc"
	// LocalityLeastConnection (LBLC) keeps a destination address with one server.
	LocalityLeastConnection Scheduler = "lblc"
	// LocalityLeastConnectionReplication (LBLCR) keeps it with a set of servers.
	LocalityLeastConnectionReplication Scheduler = "lblcr"
	// SourceHash chooses by a hash of the source, see [Config.Hash].
	SourceHash Scheduler = "sh"
	// DestinationHash chooses by a hash of the destination address.
	DestinationHash Scheduler = "dh"
	// ShortestExpectedDelay takes the one with the least (connections+1)/weight.
	ShortestExpectedDelay Scheduler = "sed"
	// NeverQueue takes an idle one, or else as ShortestExpectedDelay does.
	NeverQueue Scheduler = "nq"
	// Maglev chooses by consistent hashing of the source (Linux 4.18), see
	// [Config.Hash].
	Maglev Scheduler = "mh"
	// WeightedFailover takes the one with the highest weight (Linux 3.15).
	WeightedFailover Scheduler = "fo"
	// WeightedOverflow fills up the one with the highest weight first (Linux 4.3).
	WeightedOverflow Scheduler = "ovf"
)

var schedulers = []Scheduler{
	RoundRobin, WeightedRoundRobin, LeastConnection, WeightedLeastConnection, LocalityLeastConnection,
	LocalityLeastConnectionReplication, SourceHash, DestinationHash, ShortestExpectedDelay, NeverQueue, Maglev,
	WeightedFailover, WeightedOverflow,
}

func (s Scheduler) known() bool { return slices.Contains(schedulers, s) }

// Hash says how the schedulers [SourceHash] and [Maglev] behave; the others do not
// look at it. The zero value is what a cluster needs.
type Hash struct {
	// AddressOnly hashes the source address without the port, so that a client
	// stays with one server (leaves off sh-port and mh-port of ipvsadm(8)).
	AddressOnly bool
	// NoFallback refuses a connection whose server has weight 0 rather than choosing
	// another one (leaves off sh-fallback and mh-fallback): while an endpoint drains,
	// its share of all new connections fails.
	NoFallback bool
}

// Flags of a virtual server (include/uapi/linux/ip_vs.h, IP_VS_SVC_F_…).
const (
	flagPersistent = 0x0001
	flagHashed     = 0x0002 // the kernel's own: the server is in its table
	flagFallback   = 0x0008 // IP_VS_SVC_F_SCHED_SH_FALLBACK, IP_VS_SVC_F_SCHED_MH_FALLBACK
	flagPort       = 0x0010 // IP_VS_SVC_F_SCHED_SH_PORT, IP_VS_SVC_F_SCHED_MH_PORT
)

// flags returns the virtual server's flags that the scheduler takes.
func (s Scheduler) flags(h Hash) (flags uint32) {
	if s != SourceHash && s != Maglev {
		return 0
	}
	if !h.NoFallback {
		flags |= flagFallback
	}
	if !h.AddressOnly {
		flags |= flagPort
	}
	return flags
}
