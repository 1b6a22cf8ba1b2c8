package maglev

import (
	"encoding/binary"
	"net/netip"
)

// HashOf returns a hash of a connection's source for [Table.Find]: the same on
// every machine for the same seed, address and port. For a hash of the address
// alone the port is 0. The kernel's data planes have hashes of their own.
func HashOf(seed uint64, source netip.AddrPort) uint32 {
	return uint32(mix(hash(seed, source)+1) >> 32)
}

// hash makes 64 bits of an address and port in which every bit depends on all of
// theirs and the seed's.
func hash(seed uint64, a netip.AddrPort) uint64 {
	b := a.Addr().As16()
	h := mix(seed)
	h = mix(h ^ binary.BigEndian.Uint64(b[:8]))
	h = mix(h ^ binary.BigEndian.Uint64(b[8:]))
	return mix(h ^ uint64(a.Port()))
}

// mix is the step of SplitMix64 (Steele, Lea and Flood, OOPSLA 2014).
func mix(x uint64) uint64 {
	x += 0x9e3779b97f4a7c15
	x = (x ^ x>>30) * 0xbf58476d1ce4e5b9
	x = (x ^ x>>27) * 0x94d049bb133111eb
	return x ^ x>>31
}

// scale maps a hash evenly to a number below n.
func scale(hash, n uint32) uint32 { return uint32(uint64(hash) * uint64(n) >> 32) }
