package main

import (
	"net/netip"
	"strings"
	"testing"

	netutils "k8s.io/utils/net"

	"github.com/go-proxier/proxier/endpointslice"
)

// FuzzAddr compares ParseAddr with the parser that kube-proxy uses for the addresses of
// objects.
func FuzzAddr(f *testing.F) {
	for _, s := range []string{
		"10.0.0.1", "010.000.1.2", "::ffff:1.2.3.4", "::ffff:01.2.3.4", "fe80::1%eth0", "fe80::01%eth0", "1.2.3", "::1.2.3.4", "1::",
		"0:0:0:0:0:ffff:1.2.3.4", "0000000001.2.3.4", "2001:db8::00001", "2001:0000db8::0000", "::00", "00::00", ":", "::", "", "0", "00",
		"1:2:3:4:5:6:7::", "::2:3:4:5:6:7:8", "1::2:3:4:5:6:7:8", "000ffff::", "010000::", "1.2.3.256", "1.2.3.0256", "0x1::", "1.2.3.4.", ".1.2.3.4",
		"1:2:3:4:5:6:1.2.3.4", "1:2:3:4:5:6:7:1.2.3.4", "::a.2.3.4", "::0a.2.3.4", "1.2.3.0a", "00000:00000::00A", "::1.2.3.4:5", "+1.2.3.4", "1.2.3.4/8", " ::1",
		strings.Repeat("0", 1000) + "1::", "::" + strings.Repeat("0", 1000),
	} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		a, err := endpointslice.ParseAddr(s)
		ip := netutils.ParseIPSloppy(s)
		if (err == nil) != (ip != nil) {
			t.Fatalf("%q: %v, %v; upstream: %v", s, a, err, ip)
		}
		if u, _ := netip.AddrFromSlice(ip); u.Unmap() != a {
			t.Fatalf("%q: %v; upstream: %v", s, a, u)
		}
	})
}
