package layout

import (
	"encoding/binary"
	"math"
	"net/netip"
)

// The chains of ranges of ports exist once a frontend has one, beside those of [Handler.Variant].
const (
	ChainRanges         = "ranges"
	ChainInternalRanges = "internal-ranges"
	ChainOwnRanges      = "own-ranges"
)

// LeadsToRanges reports whether a chain leads to the ranges of ports while there are any. Its rules
// are replaced when the first range comes and when the last one goes.
func LeadsToRanges(chain string) bool {
	return chain == ChainServices || chain == ChainNodePorts || chain == ChainOwnServices
}

// OfRangeKeys reports whether the set holds the dispatch keys of ranges of ports.
func (s Set) OfRangeKeys() bool { return s == RangeKeys || s == InternalRangeKeys }

// OfRanges reports whether the set exists only if a frontend has a range of ports.
func (s Set) OfRanges() bool { return s >= FirstOfRanges && s <= LastOfRanges }

// A range of ports has a number, which the map service-ranges holds with bit 31 set. The maps
// range-keys and internal-range-keys replace it by a dispatch key. So the elements of
// service-ranges change only if the range does: the kernel makes new elements of a set of ranges
// visible a moment after the rest of a transaction, and copies the whole set for each change.
const MaxRange = MaxPool

// ShiftedBy returns the ports from and to by which the kernel turns port p of a range into target
// + p - first: it computes from + p modulo (to - from + 1) (net/netfilter/nf_nat_core.c,
// NF_NAT_RANGE_PROTO_OFFSET with the base 0). There are such ports for every shift upwards. A
// range that is shifted downwards may have none if it is long: then ok is false.
func ShiftedBy(first, last, target uint16) (from, to uint16, ok bool) {
	// No port may be less than the modulus while another is not.
	for modulus := int(last) - int(first) + 1; modulus <= math.MaxUint16+1; modulus++ {
		begin := int(first) % modulus
		from := int(target) - begin
		if begin+int(last-first) < modulus && from >= 0 && from+modulus-1 <= math.MaxUint16 {
			return uint16(from), uint16(from + modulus - 1), true
		}
	}
	return 0, 0, false
}

// Shifted returns what the kernel makes of a port of a range that is shifted by the ports from
// and to.
func Shifted(from, to, port uint16) uint16 {
	return uint16(int(from) + int(port)%(int(to)-int(from)+1))
}

// PortData returns a port as the data of the maps of shifts, which is not padded.
func PortData(p uint16) (o Octets) {
	binary.BigEndian.PutUint16(o.buf[:], p)
	o.n = 2
	return o
}

// RangeKey returns the value of a range of ports in the map service-ranges.
func RangeKey(number uint32) uint32 { return DispatchMark | number }

// RangeElement returns the element of service-ranges for a range of ports.
func RangeElement(addr netip.Addr, protocol uint8, first, last uint16, number uint32) Element {
	_, _, key := FrontendKey(false, addr, protocol, first)
	return Element{Set: ServiceRanges, Named: true, Key: key, Data: Octets{}.Port(last).Word(RangeKey(number))}
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

// SetRangeNumber sets the number of the range of an element of service-ranges.
func (e *Element) SetRangeNumber(number uint32) {
	binary.NativeEndian.PutUint32(e.Data.buf[e.Data.n-4:], RangeKey(number))
}

// RangePrefix begins the names of the chains for ranges of ports that others have, too.
const RangePrefix = "range-"

// Variant returns the name of the chain or map that the handler has in the place of the one with the given
// name, which is for single ports.
func (h Handler) Variant(name string) string {
	switch {
	case !h.Range:
		return name
	case name == ChainInternal:
		return ChainInternalRanges
	}
	return RangePrefix + name
}

// Variant is like [Handler.Variant].
func (h StickyHandler) Variant(name string) string { return Handler{Range: h.Range}.Variant(name) }
