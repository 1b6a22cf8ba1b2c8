package endpointslice

import (
	"fmt"
	"net/netip"

	"github.com/go-proxier/proxier/internal/complaint"
)

// ParseAddr parses an IP address in the forms that Kubernetes APIs accept, those of ParseIPSloppy in
// k8s.io/utils/net. Leading zeros do not mean octal: "172.30.0.041" is 172.30.0.41 (KEP-4858), and "2001:db8::00001"
// is 2001:db8::1. An IPv4-mapped IPv6 address becomes the IPv4 address. Other text and IPv6 zones are errors.
func ParseAddr(s string) (netip.Addr, error) {
	a, err := netip.ParseAddr(s)
	if err != nil {
		a, err = netip.ParseAddr(withoutLeadingZeros(s))
	}
	if err != nil {
		return netip.Addr{}, fmt.Errorf("%q is not an IP address", complaint.Value(s))
	}
	if a.Zone() != "" {
		return netip.Addr{}, fmt.Errorf("%q: addresses with a zone are not supported", complaint.Value(s))
	}
	return a.Unmap(), nil
}

// IsUnicast reports whether a can be the address of one host or Service: it is valid, and neither the unspecified
// address, nor multicast, nor 255.255.255.255.
func IsUnicast(a netip.Addr) bool {
	a = a.Unmap()
	return a.IsValid() && !a.IsUnspecified() && !a.IsMulticast() && a != netip.AddrFrom4([4]byte{255, 255, 255, 255})
}

// withoutLeadingZeros removes the leading zeros of each number in an address, but not
// its last digit.
func withoutLeadingZeros(s string) string {
	out := make([]byte, 0, len(s))
	number := false // the previous byte is a digit of a number that has begun
	for i := range len(s) {
		if s[i] == '0' && !number && i+1 < len(s) && isHexDigit(s[i+1]) {
			continue
		}
		number = isHexDigit(s[i])
		out = append(out, s[i])
	}
	return string(out)
}

func isHexDigit(c byte) bool {
	return '0' <= c && c <= '9' || 'a' <= c && c <= 'f' || 'A' <= c && c <= 'F'
}
