package endpointslice

import (
	"fmt"
	"net/netip"
	"strings"

	"github.com/go-proxier/proxier/internal/complaint"
)

// ParseAddr parses an IP address in the forms that Kubernetes APIs accept. Parts of
// an IPv4 address may have leading zeros, which do not mean octal: "172.30.0.041" is
// 172.30.0.41 (KEP-4858). An IPv4-mapped IPv6 address becomes the IPv4 address. Other
// text and IPv6 zones are errors.
func ParseAddr(s string) (netip.Addr, error) {
	a, err := netip.ParseAddr(s)
	if err != nil {
		if a, ok := parseSloppy(s); ok {
			return a, nil
		}
		return netip.Addr{}, fmt.Errorf("%q is not an IP address", complaint.Value(s))
	}
	if a.Zone() != "" {
		return netip.Addr{}, fmt.Errorf("%q: addresses with a zone are not supported", complaint.Value(s))
	}
	return a.Unmap(), nil
}

// parseSloppy parses addresses that netip rejects for leading zeros in the IPv4 part,
// which may end an IPv6 address.
func parseSloppy(s string) (netip.Addr, bool) {
	tail := strings.LastIndexByte(s, ':') + 1
	var ip [4]byte
	rest := s[tail:]
	for i := range ip {
		part := rest
		if i < 3 {
			var ok bool
			if part, rest, ok = strings.Cut(rest, "."); !ok {
				return netip.Addr{}, false
			}
		}
		n := 0
		if part == "" {
			return netip.Addr{}, false
		}
		for _, c := range []byte(part) {
			if c < '0' || c > '9' {
				return netip.Addr{}, false
			}
			if n = n*10 + int(c-'0'); n > 255 {
				return netip.Addr{}, false
			}
		}
		ip[i] = byte(n)
	}
	v4 := netip.AddrFrom4(ip)
	if tail == 0 {
		return v4, true
	}
	a, err := netip.ParseAddr(s[:tail] + v4.String())
	if err != nil {
		return netip.Addr{}, false
	}
	return a.Unmap(), true
}
