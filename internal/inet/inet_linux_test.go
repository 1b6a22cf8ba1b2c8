package inet

import (
	"testing"

	"golang.org/x/sys/unix"
	v1 "k8s.io/api/core/v1"

	"github.com/go-proxier/proxier/tracker"
)

func TestNumbersAreTheKernels(t *testing.T) {
	for p, want := range map[v1.Protocol]uint8{
		v1.ProtocolTCP: unix.IPPROTO_TCP, v1.ProtocolUDP: unix.IPPROTO_UDP, v1.ProtocolSCTP: unix.IPPROTO_SCTP, "ICMP": 0, "": 0,
	} {
		if got := Protocol(p); got != want {
			t.Errorf("Protocol(%q) = %d, want %d", p, got, want)
		}
	}
	for f, want := range map[tracker.Family][2]uint8{
		tracker.IPv4: {unix.AF_INET, unix.NFPROTO_IPV4}, tracker.IPv6: {unix.AF_INET6, unix.NFPROTO_IPV6},
	} {
		if got := AF(f); got != want[0] || got != want[1] {
			t.Errorf("AF(%v) = %d, want %d", f, got, want)
		}
	}
}
