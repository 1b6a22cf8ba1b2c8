// Package tuple encodes and decodes the parts of an entry of connection tracking.
package tuple

import (
	"net/netip"

	"github.com/vishvananda/netlink/nl"

	"github.com/go-proxier/proxier/internal/nfnl"
)

// Numbers of include/uapi/linux/netfilter/nfnetlink_conntrack.h that package nl lacks.
const (
	ctaTupleZone       = 3  // CTA_TUPLE_ZONE
	ctaFilter          = 25 // CTA_FILTER
	ctaFilterOrigFlags = 1  // CTA_FILTER_ORIG_FLAGS
	// CTA_FILTER_F_CTA_PROTO_NUM of net/netfilter/nf_internals.h
	filterProtoNum = 1 << 3
)

// Tuple is one direction of an entry of connection tracking.
type Tuple struct {
	Src, Dst netip.AddrPort
	Protocol uint8
	// Zone is the direction's conntrack zone, if HasZone.
	Zone    uint16
	HasZone bool
}

// Append appends the addresses of one direction: CTA_TUPLE_ORIG or CTA_TUPLE_REPLY.
func Append(b []byte, kind uint16, protocol uint8, src, dst netip.AddrPort) []byte {
	tuple := len(b)
	b = nfnl.BeginNested(b, kind)
	part := len(b)
	b = nfnl.BeginNested(b, nl.CTA_TUPLE_IP)
	from, to := uint16(nl.CTA_IP_V4_SRC), uint16(nl.CTA_IP_V4_DST)
	if dst.Addr().Is6() {
		from, to = nl.CTA_IP_V6_SRC, nl.CTA_IP_V6_DST
	}
	b = nfnl.AppendBytes(b, from, src.Addr().AsSlice())
	b = nfnl.AppendBytes(b, to, dst.Addr().AsSlice())
	nfnl.EndNested(b, part)
	part = len(b)
	b = nfnl.BeginNested(b, nl.CTA_TUPLE_PROTO)
	b = nfnl.AppendUint8(b, nl.CTA_PROTO_NUM, protocol)
	b = nfnl.AppendUint16(b, nl.CTA_PROTO_SRC_PORT, src.Port())
	b = nfnl.AppendUint16(b, nl.CTA_PROTO_DST_PORT, dst.Port())
	nfnl.EndNested(b, part)
	nfnl.EndNested(b, tuple)
	return b
}

// AppendFilter appends what makes a dump report one protocol alone. Kernels before 5.8 ignore it.
func AppendFilter(b []byte, protocol uint8) []byte {
	tuple := len(b)
	b = nfnl.BeginNested(b, nl.CTA_TUPLE_ORIG)
	part := len(b)
	b = nfnl.BeginNested(b, nl.CTA_TUPLE_PROTO)
	b = nfnl.AppendUint8(b, nl.CTA_PROTO_NUM, protocol)
	nfnl.EndNested(b, part)
	nfnl.EndNested(b, tuple)
	filter := len(b)
	b = nfnl.BeginNested(b, ctaFilter)
	b = nfnl.AppendNative32(b, ctaFilterOrigFlags, filterProtoNum)
	nfnl.EndNested(b, filter)
	return b
}

// Decode returns the direction that the attributes of a CTA_TUPLE_ORIG or CTA_TUPLE_REPLY
// describe.
func Decode(attrs []byte) (t Tuple) {
	var from, to netip.Addr
	var sport, dport uint16
	for kind, part := range nfnl.Attributes(attrs) {
		switch kind {
		case nl.CTA_TUPLE_IP:
			for kind, value := range nfnl.Attributes(part) {
				switch kind {
				case nl.CTA_IP_V4_SRC, nl.CTA_IP_V6_SRC:
					from, _ = netip.AddrFromSlice(value)
				case nl.CTA_IP_V4_DST, nl.CTA_IP_V6_DST:
					to, _ = netip.AddrFromSlice(value)
				}
			}
		case nl.CTA_TUPLE_PROTO:
			for kind, value := range nfnl.Attributes(part) {
				switch kind {
				case nl.CTA_PROTO_NUM:
					if len(value) == 1 {
						t.Protocol = value[0]
					}
				case nl.CTA_PROTO_SRC_PORT:
					sport = nfnl.Uint16(value)
				case nl.CTA_PROTO_DST_PORT:
					dport = nfnl.Uint16(value)
				}
			}
		case ctaTupleZone:
			t.Zone, t.HasZone = nfnl.Uint16(part), true
		}
	}
	t.Src, t.Dst = netip.AddrPortFrom(from, sport), netip.AddrPortFrom(to, dport)
	return t
}

// Entry is an entry of connection tracking. Status has the bits of enum ip_conntrack_status.
type Entry struct {
	Sent, Reply Tuple
	Status, ID  uint32
	Zone        uint16
}

// DecodeEntry returns the entry that the attributes of a message describe.
func DecodeEntry(attrs []byte) (e Entry) {
	for kind, value := range nfnl.Attributes(attrs) {
		switch kind {
		case nl.CTA_TUPLE_ORIG:
			e.Sent = Decode(value)
		case nl.CTA_TUPLE_REPLY:
			e.Reply = Decode(value)
		case nl.CTA_STATUS:
			e.Status = nfnl.Uint32(value)
		case nl.CTA_ID:
			e.ID = nfnl.Uint32(value)
		case nl.CTA_ZONE:
			e.Zone = nfnl.Uint16(value)
		}
	}
	return e
}
