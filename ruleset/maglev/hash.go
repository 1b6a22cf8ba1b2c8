package maglev

import (
	"encoding/binary"
	"math/bits"
	"net/netip"
)

// HashAddr returns a hash of a client's address for [Table.Find], where all
// connections of a client are to lead to one member. It is the one that package
// nftables has the kernel make of the same seed, the Jenkins hash of the address's
// bytes in the order of the network (linux/jhash.h, jhash), on machines with the
// least significant byte first; the others differ in IPv6. An IPv4-mapped IPv6
// address stands for the IPv4 address.
func HashAddr(seed uint64, client netip.Addr) uint32 {
	var b [16]byte
	return jenkins(put(b[:0], client), Seed32(seed))
}

// HashAddrPort is [HashAddr] of the client's address and port, where each
// connection is to have a member of its own. The kernel has two bytes of zeros
// behind the port.
func HashAddrPort(seed uint64, client netip.AddrPort) uint32 {
	var b [20]byte
	key := binary.BigEndian.AppendUint16(put(b[:0], client.Addr()), client.Port())
	return jenkins(append(key, 0, 0), Seed32(seed))
}

// Seed32 makes of a seed the one of 32 bits that [HashAddr] and [HashAddrPort]
// have. It is never 0, by which nf_tables means any.
func Seed32(seed uint64) uint32 {
	if s := uint32(seed) ^ uint32(seed>>32); s != 0 {
		return s
	}
	return 1
}

// put appends an address as it stands in a packet.
func put(b []byte, a netip.Addr) []byte {
	if a = a.Unmap(); a.Is4() {
		four := a.As4()
		return append(b, four[:]...)
	}
	sixteen := a.As16()
	return append(b, sixteen[:]...)
}

// jenkins is lookup3 as linux/jhash.h has it, of a key whose length is a multiple
// of 4 and not 0.
func jenkins(key []byte, seed uint32) uint32 {
	a := 0xdeadbeef + uint32(len(key)) + seed
	b, c := a, a
	for len(key) > 12 {
		a += binary.LittleEndian.Uint32(key)
		b += binary.LittleEndian.Uint32(key[4:])
		c += binary.LittleEndian.Uint32(key[8:])
		key = key[12:]
		step := func(x, y, z *uint32, by int) {
			*x = (*x - *z) ^ bits.RotateLeft32(*z, by)
			*z += *y
		}
		step(&a, &b, &c, 4)
		step(&b, &c, &a, 6)
		step(&c, &a, &b, 8)
		step(&a, &b, &c, 16)
		step(&b, &c, &a, 19)
		step(&c, &a, &b, 4)
	}
	for i, word := range []*uint32{&a, &b, &c} {
		if at := 4 * i; at < len(key) {
			*word += binary.LittleEndian.Uint32(key[at:])
		}
	}
	last := func(x *uint32, y uint32, by int) { *x = (*x ^ y) - bits.RotateLeft32(y, by) }
	last(&c, b, 14)
	last(&a, c, 11)
	last(&b, a, 25)
	last(&c, b, 16)
	last(&a, c, 4)
	last(&b, a, 14)
	last(&c, b, 24)
	return c
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
