package ipvs

import (
	"fmt"

	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/tracker"
)

// Scheduler names the way in which a virtual server chooses among its real servers: a kernel module without "ip_vs_"
// (ipvsadm(8), --scheduler). Every scheduler that the kernel has can be used, "lc", "wlc", "sed" and others; [New]
// and [Probe] try it, so that the kernel loads the module.
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
	// Forwarding is how packets to external and load-balancer IPs reach an endpoint. All other packets, and those of
	// this node and its pods, are translated.
	Forwarding Forwarding
	// OnePacket chooses an endpoint for each UDP packet by itself (one-packet scheduling), at addresses that are not
	// translated: IPVS does not remember where to send the answer.
	OnePacket bool
}

// Forwarding is how IPVS sends packets to an endpoint. The lowest bits of its values are the kernel's
// (IP_VS_CONN_F_FWD_MASK of include/uapi/linux/ip_vs.h).
//
// With all but ForwardingTranslated the endpoint sees the client's address and the Service's, and answers the client
// itself, without this node. "Direct forwarding" in DESIGN.md lists what that needs.
type Forwarding uint8

// The values of Forwarding.
const (
	// ForwardingTranslated replaces the destination, and on the way back the source.
	ForwardingTranslated Forwarding = 0
	// ForwardingTunnel puts packets in others to the endpoint (IPIP, and IPv6 in IPv6).
	ForwardingTunnel Forwarding = 2
	// ForwardingDirect sends packets to the next hop to the endpoint, which must be the endpoint.
	ForwardingDirect Forwarding = 3
	// ForwardingGUE is ForwardingTunnel in UDP packets to port 6080 (Generic UDP Encapsulation, Linux
	// 5.3).
	ForwardingGUE Forwarding = ForwardingTunnel | 1<<tunnelShift
	// ForwardingGRE is ForwardingTunnel in packets of Generic Routing Encapsulation (Linux 5.3).
	ForwardingGRE Forwarding = ForwardingTunnel | 2<<tunnelShift
	// forwardingMixed stands for real servers that differ.
	forwardingMixed Forwarding = 255
)

// Bits above tunnelShift are the type of a tunnel (IP_VS_CONN_F_TUNNEL_TYPE_… of
// include/uapi/linux/ip_vs.h).
const tunnelShift = 4

// portGUE is the port of Generic UDP Encapsulation (IANA).
const portGUE = 6080

// tunnel returns the type of the tunnel, or 0 for none and for IPIP.
func (f Forwarding) tunnel() uint8 {
	if f == forwardingMixed {
		return 0
	}
	return uint8(f >> tunnelShift)
}

// String describes the value, as in "connections go there …".
func (f Forwarding) String() string {
	switch f {
	case ForwardingTranslated:
		return "translated"
	case ForwardingTunnel:
		return "directly through a tunnel"
	case ForwardingGUE:
		return "directly through a GUE tunnel"
	case ForwardingGRE:
		return "directly through a GRE tunnel"
	case ForwardingDirect:
		return "directly"
	}
	return "in different ways"
}

func (p Properties) of(f *ruleset.Frontend) Forwarding {
	if f.Kind == ruleset.KindExternalIP || f.Kind == ruleset.KindLoadBalancerIP {
		return p.Forwarding
	}
	return ForwardingTranslated
}

// separates reports whether internal traffic to a frontend has a virtual server of its own.
func (p Properties) separates(s *ruleset.Port, f *ruleset.Frontend) bool {
	return f.ShortCircuit() && f.Internal != f.Target || p.of(f) != ForwardingTranslated && len(s.Pool(f.Internal)) != 0
}

// maxSchedulerName is the length of the longest name (IP_VS_SCHEDNAME_MAXLEN of
// include/uapi/linux/ip_vs.h, without the zero byte).
const maxSchedulerName = 15

// validate returns an error unless s can be the name of a kernel module.
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
	flagOnePacket  = 0x0004
	flagFallback   = 0x0008 // IP_VS_SVC_F_SCHED_SH_FALLBACK, IP_VS_SVC_F_SCHED_MH_FALLBACK
	flagPort       = 0x0010 // IP_VS_SVC_F_SCHED_SH_PORT, IP_VS_SVC_F_SCHED_MH_PORT
)

func (s Scheduler) flags(h tracker.Hash) uint32 {
	if s != SourceHash && s != Maglev {
		return 0
	}
	if h == tracker.HashSourcePort || h == tracker.HashNone && s == Maglev {
		return flagFallback | flagPort
	}
	return flagFallback
}
