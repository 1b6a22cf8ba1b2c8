package conntrack

import (
	"fmt"
	"net/netip"

	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"github.com/go-proxier/proxier/internal/inet"
	"github.com/go-proxier/proxier/internal/nfnl"
	"github.com/go-proxier/proxier/internal/nfnl/tuple"
	"github.com/go-proxier/proxier/tracker"
)

// Numbers that package nl lacks (include/uapi/linux/netfilter/nfnetlink_conntrack.h).
const (
	ctGetStats         = 5  // IPCTNL_MSG_CT_GET_STATS
	ctaFilter          = 25 // CTA_FILTER
	ctaFilterOrigFlags = 1  // CTA_FILTER_ORIG_FLAGS
	// CTA_FILTER_F_CTA_PROTO_NUM of net/netfilter/nf_internals.h
	filterProtoNum = 1 << 3
)

// dumpRequest returns the request for the flows of a family in some zones. Kernels from
// 5.8 on report UDP flows alone (CTA_FILTER); older ones ignore the attribute. Kernels from
// 6.8 on report the flows of one zone (CTA_ZONE); older ones ignore the attribute. The
// request for zone 0 does not name the zone, because a kernel without
// CONFIG_NF_CONNTRACK_ZONES refuses the attribute.
func dumpRequest(f tracker.Family, zones []uint16) nfnl.Request {
	b := tuple.AppendProtocol(nil, inet.UDP)
	if len(zones) == 1 && zones[0] != 0 {
		b = nfnl.AppendUint16(b, nl.CTA_ZONE, zones[0])
	}
	filter := len(b)
	b = nfnl.BeginNested(b, ctaFilter)
	b = nfnl.AppendNative32(b, ctaFilterOrigFlags, filterProtoNum)
	nfnl.EndNested(b, filter)
	return nfnl.Request{Subsystem: unix.NFNL_SUBSYS_CTNETLINK, Type: nl.IPCTNL_MSG_CT_GET, Family: inet.AF(f), Dump: true, Attrs: b}
}

// appendDelete appends a request to delete the entry of f and no other.
func appendDelete(b []byte, seq uint32, f *Flow) []byte {
	start := len(b)
	b = nfnl.Begin(b, unix.NFNL_SUBSYS_CTNETLINK, nl.IPCTNL_MSG_CT_DELETE, unix.NLM_F_ACK, seq, inet.AF(tracker.FamilyOf(f.Dst.Addr())))
	b = tuple.Append(b, nl.CTA_TUPLE_ORIG, f.Protocol, f.Src, f.Dst)
	if f.Zone != 0 && !f.ReplyZone { // the zone of the original direction
		b = nfnl.AppendUint16(b, nl.CTA_ZONE, f.Zone)
	}
	// The ID keeps the kernel from deleting a newer entry with the same addresses.
	b = nfnl.AppendUint32(b, nl.CTA_ID, f.ID)
	nfnl.End(b, start)
	return b
}

// decodeFlow reads the attributes of an IPCTNL_MSG_CT_NEW message and sets all fields of f.
func decodeFlow(attrs []byte, f *Flow) error {
	*f = Flow{}
	for kind, value := range nfnl.Attributes(attrs) {
		switch kind {
		case nl.CTA_TUPLE_ORIG:
			t := tuple.Decode(value)
			f.Src, f.Dst, f.Protocol = t.Src, t.Dst, t.Protocol
			if t.HasZone {
				f.Zone, f.ReplyZone = t.Zone, false
			}
		case nl.CTA_TUPLE_REPLY:
			t := tuple.Decode(value)
			f.ReplySrc, f.ReplyDst = t.Src, t.Dst
			if t.HasZone {
				f.Zone, f.ReplyZone = t.Zone, true
			}
		case nl.CTA_ID:
			f.ID = nfnl.Uint32(value)
		case nl.CTA_ZONE:
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
