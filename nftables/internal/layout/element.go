package layout

import (
	"encoding/binary"
	"net/netip"
)

// Element is one element of one of the table's sets. Equal elements are the same to the
// kernel.
type Element struct {
	Set Set
	// Named elements have the Service port's name as their comment.
	Named     bool
	Key, Data Octets
}

// Octets is a key or the data of an element in the kernel's encoding, whose fields are
// aligned to 32 bits. The widest is the key of allowed sources of IPv6.
type Octets struct {
	buf [40]byte
	n   uint8
}

// OctetsOf returns a copy of at most 40 bytes.
func OctetsOf(b []byte) (o Octets) {
	o.n = uint8(copy(o.buf[:], b))
	return o
}

// Bytes returns the encoded bytes, which share o's memory.
func (o *Octets) Bytes() []byte { return o.buf[:o.n] }

// IP returns the address that o consists of.
func (o *Octets) IP() netip.Addr {
	a, _ := netip.AddrFromSlice(o.Bytes())
	return a
}

// Addr returns o with an address appended.
func (o Octets) Addr(a netip.Addr) Octets {
	if a.Is4() {
		v := a.As4()
		o.n += uint8(copy(o.buf[o.n:], v[:]))
		return o
	}
	v := a.As16()
	o.n += uint8(copy(o.buf[o.n:], v[:]))
	return o
}

// Word returns o with a number in the machine's byte order appended.
func (o Octets) Word(v uint32) Octets {
	binary.NativeEndian.PutUint32(o.buf[o.n:], v)
	o.n += 4
	return o
}

// Proto returns o with the number of a transport protocol appended.
func (o Octets) Proto(p uint8) Octets {
	o.buf[o.n] = p
	o.n += 4
	return o
}

// Port returns o with a port appended.
func (o Octets) Port(p uint16) Octets {
	binary.BigEndian.PutUint16(o.buf[o.n:], p)
	o.n += 4
	return o
}

// PortOffset is the length of the protocol and port at the end of a frontend's key.
const PortOffset = 8

// FrontendKey returns the maps that hold a frontend's dispatch keys, and its key in them.
// The key of a NodePort has no address.
func FrontendKey(nodePort bool, addr netip.Addr, protocol uint8, port uint16) (all, internal Set, key Octets) {
	if nodePort {
		return NodePorts, InternalNodePorts, Octets{}.Proto(protocol).Port(port)
	}
	return ServiceIPs, InternalIPs, Octets{}.Addr(addr).Proto(protocol).Port(port)
}

// Allowed returns the set of sources with prefixes of the given length.
func Allowed(bits int) Set { return FirstAllowed + Set(bits) }

// SourceKey returns the key that allows the sources of a frontend from the first address on.
func SourceKey(first, addr netip.Addr, protocol uint8, port uint16) Octets {
	return Octets{}.Addr(first).Addr(addr).Proto(protocol).Port(port)
}

// ParseAddrPort reads an address and port from the data of an element.
func ParseAddrPort(data []byte) (netip.AddrPort, bool) {
	if len(data) != 8 && len(data) != 20 {
		return netip.AddrPort{}, false
	}
	n := len(data) - 4
	addr, ok := netip.AddrFromSlice(data[:n])
	return netip.AddrPortFrom(addr, binary.BigEndian.Uint16(data[n:])), ok
}

// FastPath is the name of the flowtable. Some shorter names are keywords of nft.
const FastPath = "fast-path"

// LoopbackInterface is the interface by which the node's packets to its own
// addresses go out of the output hook and come in again.
const LoopbackInterface = "lo"
