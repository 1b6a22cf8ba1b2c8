package tracker

import "net/netip"

// Family is an IP address family. The zero value is not a family and never occurs in
// a published value.
type Family uint8

// The address families, numbered as IP's version field (RFC 791, RFC 8200).
const (
	IPv4 Family = 4
	IPv6 Family = 6
)

// FamilyOf returns the family of a, or 0 for the zero Addr. An IPv4-mapped IPv6
// address counts as IPv4.
func FamilyOf(a netip.Addr) Family {
	switch {
	case a.Is4(), a.Is4In6():
		return IPv4
	case a.Is6():
		return IPv6
	}
	return 0
}

// String returns "IPv4" or "IPv6", as [k8s.io/api/core/v1.IPFamily] spells them,
// and "none" for anything else.
func (f Family) String() string {
	switch f {
	case IPv4:
		return "IPv4"
	case IPv6:
		return "IPv6"
	}
	return "none"
}

// Bits returns the length of the family's addresses in bits: 32, 128, or 0 if f is
// not a family.
func (f Family) Bits() int {
	switch f {
	case IPv4:
		return 32
	case IPv6:
		return 128
	}
	return 0
}
