package ipvs

import (
	"fmt"

	"github.com/go-proxier/proxier/tracker"
)

// Scheduler names the way in which a virtual server chooses among its real servers. It is
// the name of a kernel module without "ip_vs_" (ipvsadm(8), --scheduler). Every scheduler
// that the kernel has can be used; [New] and [Probe] try it.
type Scheduler string

// Schedulers of Linux. The kernel loads their modules when they are first used.
const (
	// RoundRobin takes one server after the other, and ignores weights.
	RoundRobin Scheduler = "rr"
	// WeightedRoundRobin takes one server after the other, in proportion to the weights.
	WeightedRoundRobin Scheduler = "wrr"
	// LeastConnection takes the server with the fewest connections.
	LeastConnection Scheduler = "lc"
	// WeightedLeastConnection takes the server with the fewest connections for its weight.
	WeightedLeastConnection Scheduler = "wlc"
	// LocalityLeastConnection (LBLC) keeps a destination address with one server.
	LocalityLeastConnection Scheduler = "lblc"
	// LocalityLeastConnectionReplication (LBLCR) keeps a destination address with a set
	// of servers.
	LocalityLeastConnectionReplication Scheduler = "lblcr"
	// SourceHash chooses by a hash of the source address, see [Config.Hash].
	SourceHash Scheduler = "sh"
	// DestinationHash chooses by a hash of the destination address.
	DestinationHash Scheduler = "dh"
	// ShortestExpectedDelay takes the server with the least (connections+1)/weight.
	ShortestExpectedDelay Scheduler = "sed"
	// NeverQueue takes a server without connections, or else chooses as
	// ShortestExpectedDelay does.
	NeverQueue Scheduler = "nq"
	// Maglev chooses by consistent hashing of the source address and port (Linux
	// 4.18), see [Config.Hash].
	Maglev Scheduler = "mh"
	// WeightedFailover takes the server with the highest weight (Linux 3.15).
	WeightedFailover Scheduler = "fo"
	// WeightedOverflow fills up the server with the highest weight first (Linux 4.3).
	WeightedOverflow Scheduler = "ovf"
)

// maxSchedulerName is the length of the longest name (IP_VS_SCHEDNAME_MAXLEN of
// include/uapi/linux/ip_vs.h, without the zero byte).
const maxSchedulerName = 15

// validate returns an error unless s can be the name of a kernel module. Only the kernel
// can report whether the module exists.
func (s Scheduler) validate() error {
	if s == "" || len(s) > maxSchedulerName {
		return fmt.Errorf("scheduler %q is not 1 to %d bytes long", s, maxSchedulerName)
	}
	for _, c := range []byte(s) {
		if (c < 'a' || c > 'z') && (c < 'A' || c > 'Z') && (c < '0' || c > '9') && c != '_' && c != '-' {
			return fmt.Errorf("scheduler %q cannot be the name of a kernel module", s)
		}
	}
	return nil
}

// Hash configures the schedulers [SourceHash] and [Maglev]. Other schedulers ignore
// it. The zero value suits most clusters.
type Hash struct {
	// Source selects the parts of a connection's source that are hashed.
	// [tracker.HashSource] is the address alone, so that a client stays with one server.
	// [tracker.HashSourcePort] is address and port (sh-port and mh-port of ipvsadm(8)).
	// [tracker.HashNone] is kube-proxy's choice: the address for SourceHash, address and
	// port for Maglev.
	Source tracker.Hash
	// NoFallback turns off sh-fallback and mh-fallback of ipvsadm(8): IPVS then refuses a
	// connection whose server has weight 0 and does not choose another server. While an
	// endpoint drains, its share of all new connections fails. kube-proxy has no fallback.
	NoFallback bool
}

// Flags of a virtual server (include/uapi/linux/ip_vs.h, IP_VS_SVC_F_…).
const (
	flagPersistent = 0x0001
	flagHashed     = 0x0002 // the kernel's own: the server is in its table
	flagFallback   = 0x0008 // IP_VS_SVC_F_SCHED_SH_FALLBACK, IP_VS_SVC_F_SCHED_MH_FALLBACK
	flagPort       = 0x0010 // IP_VS_SVC_F_SCHED_SH_PORT, IP_VS_SVC_F_SCHED_MH_PORT
)

// flags returns the virtual server's flags for the scheduler.
func (s Scheduler) flags(h Hash) (flags uint32) {
	if s != SourceHash && s != Maglev {
		return 0
	}
	if !h.NoFallback {
		flags |= flagFallback
	}
	if h.Source == tracker.HashSourcePort || h.Source == tracker.HashNone && s == Maglev {
		flags |= flagPort
	}
	return flags
}
