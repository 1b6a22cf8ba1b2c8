package layout

import (
	"encoding/binary"
	"net/netip"

	v1 "k8s.io/api/core/v1"

	"github.com/go-proxier/proxier/internal/inet"
)

// Element is one element of one of the table's sets. Equal elements are the same to the
// kernel.
type Element struct {
	Set Set
	// Named elements have the Service port's name as their comment.
	Named     bool
	Key, Data Octets
}

// RangeElement returns the element of service-ranges for a range of ports.
func RangeElement(addr netip.Addr, p v1.Protocol, first, last uint16, number uint32) Element {
	_, _, key := FrontendKey(false, addr, p, first)
	return Element{Set: ServiceRanges, Named: true, Key: key, Data: Octets{}.Port(last).Word(RangeKey(number))}
}

// RangeSource returns the element of the allowed sources of a range of ports.
func RangeSource(from, to, addr netip.Addr, p v1.Protocol, first, last uint16) Element {
	key := Octets{}.Addr(from).Addr(addr).Proto(p).Port(first)
	return Element{Set: RangeSources, Key: key, Data: Octets{}.Addr(to).Port(last)}
}

// End returns the last key of an element of a set of ranges of concatenations, and the element's
// data in the kernel.
func (e *Element) End() (last, data Octets) {
	end := e.Data.Bytes()
	n := 0
	last = e.Key
	if e.Set == RangeSources {
		n = len(end) - 4
		copy(last.buf[:n], end)
	}
	copy(last.buf[last.n-4:last.n], end[n:n+4])
	return last, OctetsOf(end[n+4:])
}

// ConcatElement returns the element of a set of ranges of concatenations that the kernel has, and
// reports whether this package can have written it.
func ConcatElement(s Set, first, last, data []byte) (Element, bool) {
	e := Element{Set: s, Named: s == ServiceRanges, Key: OctetsOf(first)}
	if len(first) != len(last) || len(first) < PortOffset+4 {
		return e, false
	}
	var end []byte
	if s == RangeSources {
		end = append(end, last[:(len(last)-PortOffset)/2]...)
	}
	end = append(end, last[len(last)-4:]...)
	e.Data = OctetsOf(append(end, data...))
	wantLast, wantData := e.End()
	return e, string(wantLast.Bytes()) == string(last) && string(wantData.Bytes()) == string(data)
}

// RangeNumber returns the number of the range of an element of service-ranges.
func (e *Element) RangeNumber() uint32 {
	_, data := e.End()
	if data.n != 4 {
		return 0
	}
	return binary.NativeEndian.Uint32(data.Bytes()) &^ DispatchMark
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

// Len returns the number of bytes.
func (o *Octets) Len() int { return int(o.n) }

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

// Proto returns o with a transport protocol appended.
func (o Octets) Proto(p v1.Protocol) Octets {
	o.buf[o.n] = inet.Protocol(p)
	o.n += 4
	return o
}

// Port returns o with a port appended.
func (o Octets) Port(p uint16) Octets {
	binary.BigEndian.PutUint16(o.buf[o.n:], p)
	o.n += 4
	return o
}

// PortData returns the data of a map that leads to a port alone, which is not padded.
func PortData(p uint16) Octets { return OctetsOf(binary.BigEndian.AppendUint16(nil, p)) }

// PortOffset is the length of the protocol and port at the end of a frontend's key.
const PortOffset = 8

// FrontendKey returns the maps that hold a frontend's dispatch keys, and its key in them.
// The key of a NodePort has no address.
func FrontendKey(nodePort bool, addr netip.Addr, p v1.Protocol, port uint16) (all, internal Set, key Octets) {
	if nodePort {
		return NodePorts, InternalNodePorts, Octets{}.Proto(p).Port(port)
	}
	return ServiceIPs, InternalIPs, Octets{}.Addr(addr).Proto(p).Port(port)
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

// InterfaceName returns the key of an interface, which is also what rules compare a whole name
// with.
func InterfaceName(name string) Octets {
	var o Octets
	copy(o.buf[:], name)
	o.n = interfaceNameLen
	return o
}
