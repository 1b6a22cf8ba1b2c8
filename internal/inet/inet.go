// Package inet translates the API's names of address families and transport
// protocols to the kernel's numbers.
package inet

import (
	"net/netip"

	v1 "k8s.io/api/core/v1"

	"github.com/go-proxier/proxier/tracker"
)

// IP protocol numbers (IPPROTO_* of include/uapi/linux/in.h).
const (
	TCP  = 6
	UDP  = 17
	SCTP = 132
)

// Address family numbers of Linux (include/linux/socket.h). The netfilter
// subsystems use the same numbers (NFPROTO_* of include/uapi/linux/netfilter.h).
// golang.org/x/sys/unix would give the numbers of the system for which it is built, and
// those of other systems differ.
const (
	afINET  = 2
	afINET6 = 10
)

// Protocol returns the IP protocol number of p, or 0 if a Service cannot have the
// protocol.
func Protocol(p v1.Protocol) uint8 {
	switch p {
	case v1.ProtocolTCP:
		return TCP
	case v1.ProtocolUDP:
		return UDP
	case v1.ProtocolSCTP:
		return SCTP
	}
	return 0
}

// ProtocolOf returns the protocol with a number, or "" if a Service cannot have it.
func ProtocolOf(number uint8) v1.Protocol {
	for _, p := range []v1.Protocol{v1.ProtocolTCP, v1.ProtocolUDP, v1.ProtocolSCTP} {
		if Protocol(p) == number {
			return p
		}
	}
	return ""
}

// AF returns the number of an address family.
func AF(f tracker.Family) uint8 {
	if f == tracker.IPv6 {
		return afINET6
	}
	return afINET
}

// Prefixes returns the valid prefixes of the family, masked to their length.
func Prefixes(list []netip.Prefix, f tracker.Family) (out []netip.Prefix) {
	for _, p := range list {
		if p.IsValid() && tracker.FamilyOf(p.Addr()) == f {
			out = append(out, p.Masked())
		}
	}
	return out
}
