package nfnl

import (
	"net/netip"

	"github.com/vishvananda/netlink/nl"
)

// ctaTupleZone is CTA_TUPLE_ZONE of include/uapi/linux/netfilter/nfnetlink_conntrack.h.
const ctaTupleZone = 3

// Tuple is one direction of an entry of connection tracking.
type Tuple struct {
	Src, Dst netip.AddrPort
	Protocol uint8
	// Zone is the direction's conntrack zone, if HasZone.
	Zone    uint16
	HasZone bool
}

// AppendTuple appends the addresses of one direction: CTA_TUPLE_ORIG or CTA_TUPLE_REPLY.
func AppendTuple(b []byte, kind uint16, protocol uint8, src, dst netip.AddrPort) []byte {
	tuple := len(b)
	b = BeginNested(b, kind)
	part := len(b)
	b = BeginNested(b, nl.CTA_TUPLE_IP)
	from, to := uint16(nl.CTA_IP_V4_SRC), uint16(nl.CTA_IP_V4_DST)
	if dst.Addr().Is6() {
		from, to = nl.CTA_IP_V6_SRC, nl.CTA_IP_V6_DST
	}
	b = AppendBytes(b, from, src.Addr().AsSlice())
	b = AppendBytes(b, to, dst.Addr().AsSlice())
	EndNested(b, part)
	part = len(b)
	b = BeginNested(b, nl.CTA_TUPLE_PROTO)
	b = AppendUint8(b, nl.CTA_PROTO_NUM, protocol)
	b = AppendUint16(b, nl.CTA_PROTO_SRC_PORT, src.Port())
	b = AppendUint16(b, nl.CTA_PROTO_DST_PORT, dst.Port())
	EndNested(b, part)
	EndNested(b, tuple)
	return b
}

// AppendProtocol appends an original direction of which only the protocol is known, for a filter.
func AppendProtocol(b []byte, protocol uint8) []byte {
	tuple := len(b)
	b = BeginNested(b, nl.CTA_TUPLE_ORIG)
	part := len(b)
	b = BeginNested(b, nl.CTA_TUPLE_PROTO)
	b = AppendUint8(b, nl.CTA_PROTO_NUM, protocol)
	EndNested(b, part)
	EndNested(b, tuple)
	return b
}

// DecodeTuple returns the direction that the attributes of a CTA_TUPLE_ORIG or CTA_TUPLE_REPLY
// describe.
func DecodeTuple(attrs []byte) (t Tuple) {
	var from, to netip.Addr
	var sport, dport uint16
	for kind, part := range Attributes(attrs) {
		switch kind {
		case nl.CTA_TUPLE_IP:
			for kind, value := range Attributes(part) {
				switch kind {
				case nl.CTA_IP_V4_SRC, nl.CTA_IP_V6_SRC:
					from, _ = netip.AddrFromSlice(value)
				case nl.CTA_IP_V4_DST, nl.CTA_IP_V6_DST:
					to, _ = netip.AddrFromSlice(value)
				}
			}
		case nl.CTA_TUPLE_PROTO:
			for kind, value := range Attributes(part) {
				switch kind {
				case nl.CTA_PROTO_NUM:
					if len(value) == 1 {
						t.Protocol = value[0]
					}
				case nl.CTA_PROTO_SRC_PORT:
					sport = Uint16(value)
				case nl.CTA_PROTO_DST_PORT:
					dport = Uint16(value)
				}
			}
		case ctaTupleZone:
			t.Zone, t.HasZone = Uint16(part), true
		}
	}
	t.Src, t.Dst = netip.AddrPortFrom(from, sport), netip.AddrPortFrom(to, dport)
	return t
}
