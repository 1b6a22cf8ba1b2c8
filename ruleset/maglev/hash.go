package maglev

import (
	"encoding/binary"
	"math/bits"
	"net/netip"
)

// HashAddr returns a hash of a client's address for [Table.Find]. It sends all
// connections of a client to one member. It equals the hash that package nftables
// makes the kernel compute for the same seed: the Jenkins hash of the address in
// network byte order (linux/jhash.h, jhash). On big-endian machines the kernel's hash
// of IPv6 addresses differs. An IPv4-mapped IPv6 address means the IPv4 address.
func HashAddr(seed uint64, client netip.Addr) uint32 {
	var b [16]byte
	return jenkins(put(b[:0], client), Seed32(seed))
}

// HashAddrPort returns a hash of a client's address and port for [Table.Find]. It
// distributes the connections of a client over the members. As in the kernel, two
// zero bytes follow the port. Otherwise it equals [HashAddr].
func HashAddrPort(seed uint64, client netip.AddrPort) uint32 {
	var b [20]byte
	key := binary.BigEndian.AppendUint16(put(b[:0], client.Addr()), client.Port())
	return jenkins(append(key, 0, 0), Seed32(seed))
}

// Seed32 returns the 32-bit seed that [HashAddr] and [HashAddrPort] derive from seed.
// It is never 0, which nf_tables treats as a request for a random seed.
func Seed32(seed uint64) uint32 {
	if s := uint32(seed) ^ uint32(seed>>32); s != 0 {
		return s
	}
	return 1
}

// put appends an address in network byte order.
func put(b []byte, a netip.Addr) []byte {
	if a = a.Unmap(); a.Is4() {
		four := a.As4()
		return append(b, four[:]...)
	}
	sixteen := a.As16()
	return append(b, sixteen[:]...)
}

// jenkins is lookup3 as in linux/jhash.h, for a key whose length is a non-zero
// multiple of 4.
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

// hash returns a 64-bit hash of an address and port. Every bit depends on all bits of
// the input and the seed.
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
