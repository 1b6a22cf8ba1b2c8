package conntrack

import (
	"fmt"
	"net/netip"
	"slices"

	"github.com/go-proxier/proxier/internal/inet"
	"github.com/go-proxier/proxier/internal/nfnl"
	"github.com/go-proxier/proxier/tracker"
)

// Message types, attributes and flags of the conntrack subsystem
// (include/uapi/linux/netfilter/nfnetlink.h and nfnetlink_conntrack.h).
const (
	subsystem = 1 // NFNL_SUBSYS_CTNETLINK

	ctNew      = 0 // IPCTNL_MSG_CT_NEW
	ctGet      = 1 // IPCTNL_MSG_CT_GET
	ctDelete   = 2 // IPCTNL_MSG_CT_DELETE
	ctGetStats = 5 // IPCTNL_MSG_CT_GET_STATS

	ctaTupleOrig  = 1  // CTA_TUPLE_ORIG
	ctaTupleReply = 2  // CTA_TUPLE_REPLY
	ctaID         = 12 // CTA_ID
	ctaZone       = 18 // CTA_ZONE
	ctaFilter     = 25 // CTA_FILTER

	ctaTupleIP    = 1 // CTA_TUPLE_IP
	ctaTupleProto = 2 // CTA_TUPLE_PROTO
	ctaTupleZone  = 3 // CTA_TUPLE_ZONE

	ctaIPv4Src = 1 // CTA_IP_V4_SRC
	ctaIPv4Dst = 2 // CTA_IP_V4_DST
	ctaIPv6Src = 3 // CTA_IP_V6_SRC
	ctaIPv6Dst = 4 // CTA_IP_V6_DST

	ctaProtoNum     = 1 // CTA_PROTO_NUM
	ctaProtoSrcPort = 2 // CTA_PROTO_SRC_PORT
	ctaProtoDstPort = 3 // CTA_PROTO_DST_PORT

	ctaFilterOrigFlags = 1 // CTA_FILTER_ORIG_FLAGS
	// CTA_FILTER_F_CTA_PROTO_NUM of net/netfilter/nf_internals.h
	filterProtoNum = 1 << 3

	flagAck = 0x4 // NLM_F_ACK of include/uapi/linux/netlink.h
)

// dumpRequest returns the request for the flows of a family in some zones. Kernels from
// 5.8 on report UDP flows alone (CTA_FILTER); older ones ignore the attribute. Kernels from
// 6.8 on report the flows of one zone (CTA_ZONE); older ones ignore the attribute. The
// request for zone 0 does not name the zone, because a kernel without
// CONFIG_NF_CONNTRACK_ZONES refuses the attribute.
func dumpRequest(f tracker.Family, zones []uint16) nfnl.Request {
	b := nfnl.BeginNested(nil, ctaTupleOrig)
	proto := len(b)
	b = nfnl.BeginNested(b, ctaTupleProto)
	b = nfnl.AppendUint8(b, ctaProtoNum, inet.UDP)
	nfnl.EndNested(b, proto)
	nfnl.EndNested(b, 0)
	if len(zones) == 1 && zones[0] != 0 {
		b = nfnl.AppendUint16(b, ctaZone, zones[0])
	}
	filter := len(b)
	b = nfnl.BeginNested(b, ctaFilter)
	b = nfnl.AppendNative32(b, ctaFilterOrigFlags, filterProtoNum)
	nfnl.EndNested(b, filter)
	return nfnl.Request{Subsystem: subsystem, Type: ctGet, Family: inet.AF(f), Dump: true, Attrs: b}
}

// appendTuple appends the addresses of one direction.
func appendTuple(b []byte, kind uint16, protocol uint8, src, dst netip.AddrPort) []byte {
	tuple := len(b)
	b = nfnl.BeginNested(b, kind)
	part := len(b)
	b = nfnl.BeginNested(b, ctaTupleIP)
	from, to := uint16(ctaIPv4Src), uint16(ctaIPv4Dst)
	if dst.Addr().Is6() {
		from, to = ctaIPv6Src, ctaIPv6Dst
	}
	b = nfnl.AppendBytes(b, from, src.Addr().AsSlice())
	b = nfnl.AppendBytes(b, to, dst.Addr().AsSlice())
	nfnl.EndNested(b, part)
	part = len(b)
	b = nfnl.BeginNested(b, ctaTupleProto)
	b = nfnl.AppendUint8(b, ctaProtoNum, protocol)
	b = nfnl.AppendUint16(b, ctaProtoSrcPort, src.Port())
	b = nfnl.AppendUint16(b, ctaProtoDstPort, dst.Port())
	nfnl.EndNested(b, part)
	nfnl.EndNested(b, tuple)
	return b
}

// appendDelete appends a request to delete the entry of f and no other.
func appendDelete(b []byte, seq uint32, f *Flow) []byte {
	start := len(b)
	b = nfnl.Begin(b, subsystem, ctDelete, flagAck, seq, inet.AF(tracker.FamilyOf(f.Dst.Addr())))
	b = appendTuple(b, ctaTupleOrig, f.Protocol, f.Src, f.Dst)
	if f.Zone != 0 && !f.ReplyZone { // the zone of the original direction
		b = nfnl.AppendUint16(b, ctaZone, f.Zone)
	}
	// The ID keeps the kernel from deleting a newer entry with the same addresses.
	b = nfnl.AppendUint32(b, ctaID, f.ID)
	nfnl.End(b, start)
	return b
}

// inZones reports whether zone is one of zones. Empty zones means zone 0.
func inZones(zones []uint16, zone uint16) bool {
	if len(zones) == 0 {
		return zone == 0
	}
	return slices.Contains(zones, zone)
}

// decodeFlow reads the attributes of an IPCTNL_MSG_CT_NEW message and sets all fields of f.
func decodeFlow(attrs []byte, f *Flow) error {
	*f = Flow{}
	for kind, value := range nfnl.Attributes(attrs) {
		switch kind {
		case ctaTupleOrig:
			f.Src, f.Dst = decodeTuple(value, f, false)
		case ctaTupleReply:
			f.ReplySrc, f.ReplyDst = decodeTuple(value, f, true)
		case ctaID:
			f.ID = nfnl.Uint32(value)
		case ctaZone:
			f.Zone, f.ReplyZone = nfnl.Uint16(value), false
		}
	}
	family := tracker.FamilyOf(f.Src.Addr())
	for _, a := range [...]netip.Addr{f.Src.Addr(), f.Dst.Addr(), f.ReplySrc.Addr(), f.ReplyDst.Addr()} {
		if family == 0 || a.BitLen() != family.Bits() {
			return fmt.Errorf("%w: flow without four addresses of one family", ErrMalformed)
		}
	}
	return nil
}

// decodeTuple returns the addresses of one direction, and sets the protocol and zone of f.
func decodeTuple(tuple []byte, f *Flow, reply bool) (src, dst netip.AddrPort) {
	var from, to netip.Addr
	var sport, dport uint16
	for kind, part := range nfnl.Attributes(tuple) {
		switch kind {
		case ctaTupleIP:
			for kind, value := range nfnl.Attributes(part) {
				switch kind {
				case ctaIPv4Src, ctaIPv6Src:
					from, _ = netip.AddrFromSlice(value)
				case ctaIPv4Dst, ctaIPv6Dst:
					to, _ = netip.AddrFromSlice(value)
				}
			}
		case ctaTupleProto:
			for kind, value := range nfnl.Attributes(part) {
				switch kind {
				case ctaProtoNum:
					if len(value) == 1 {
						f.Protocol = value[0]
					}
				case ctaProtoSrcPort:
					sport = nfnl.Uint16(value)
				case ctaProtoDstPort:
					dport = nfnl.Uint16(value)
				}
			}
		case ctaTupleZone:
			f.Zone, f.ReplyZone = nfnl.Uint16(part), reply
		}
	}
	return netip.AddrPortFrom(from, sport), netip.AddrPortFrom(to, dport)
}
