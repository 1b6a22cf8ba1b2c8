package ipvs

import (
	"fmt"

	"github.com/go-proxier/proxier/tracker"
)

// Scheduler names the way in which a virtual server chooses among its real servers. It is
// the name of a kernel module without "ip_vs_" (ipvsadm(8), --scheduler). Every scheduler
// that the kernel has can be used, "lc", "wlc", "sed" and others; [New] and [Probe] try it.
// The kernel loads the module when the scheduler is first used.
type Scheduler string

// The schedulers that the backend treats differently from others.
const (
	// RoundRobin takes one server after the other, and ignores weights.
	RoundRobin Scheduler = "rr"
	// WeightedRoundRobin takes one server after the other, in proportion to the weights.
	WeightedRoundRobin Scheduler = "wrr"
	// SourceHash chooses by a hash of the source address.
	SourceHash Scheduler = "sh"
	// Maglev chooses by consistent hashing of the source address and port (Linux
	// 4.18).
	Maglev Scheduler = "mh"
)

// Schedulers returns the names of all schedulers of Linux 6.12, for [Config].Schedulers.
func Schedulers() []Scheduler {
	return []Scheduler{RoundRobin, WeightedRoundRobin, "lc", "wlc", "lblc", "lblcr", "dh", SourceHash, "sed", "nq", "fo", "ovf", Maglev}
}

// Properties are the properties of a Service port's virtual servers.
type Properties struct {
	// Scheduler chooses among the endpoints. "" means that of the [Config], or what the Service
	// asks for by a hash.
	Scheduler Scheduler
	// HashPort makes [SourceHash] and [Maglev] hash the client's port, too (sh-port, mh-port). Both
	// always fall back to another endpoint while one drains (sh-fallback, mh-fallback).
	HashPort bool
}

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

// Flags of a virtual server (include/uapi/linux/ip_vs.h, IP_VS_SVC_F_…).
const (
	flagPersistent = 0x0001
	flagHashed     = 0x0002 // the kernel's own: the server is in its table
	flagFallback   = 0x0008 // IP_VS_SVC_F_SCHED_SH_FALLBACK, IP_VS_SVC_F_SCHED_MH_FALLBACK
	flagPort       = 0x0010 // IP_VS_SVC_F_SCHED_SH_PORT, IP_VS_SVC_F_SCHED_MH_PORT
)

// flags returns the virtual server's flags for the scheduler.
func (s Scheduler) flags(h tracker.Hash) uint32 {
	if s != SourceHash && s != Maglev {
		return 0
	}
	if h == tracker.HashSourcePort || h == tracker.HashNone && s == Maglev {
		return flagFallback | flagPort
	}
	return flagFallback
}
