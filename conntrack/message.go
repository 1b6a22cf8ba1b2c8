package conntrack

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"syscall"

	"github.com/go-proxier/proxier/tracker"
)

// The parts of netlink that are used here. Lengths, types and flags are in the
// machine's byte order, addresses, ports and most other attributes in the
// network's.
//
// Constants are from include/uapi/linux/netlink.h, .../netfilter/nfnetlink.h and
// .../netfilter/nfnetlink_conntrack.h unless said otherwise.
const (
	nlmHeaderLen = 16 // struct nlmsghdr
	nfgenLen     = 4  // struct nfgenmsg

	nlmError = 2 // NLMSG_ERROR
	nlmDone  = 3 // NLMSG_DONE

	flagRequest  = 0x1   // NLM_F_REQUEST
	flagAck      = 0x4   // NLM_F_ACK
	flagDump     = 0x300 // NLM_F_DUMP
	flagDumpIntr = 0x10  // NLM_F_DUMP_INTR

	// Message types: NFNL_SUBSYS_CTNETLINK<<8 and IPCTNL_MSG_CT_...
	ctNew      = 0x100 // NEW
	ctGet      = 0x101 // GET
	ctDelete   = 0x102 // DELETE
	ctGetStats = 0x105 // GET_STATS

	attrNested   = 0x8000 // NLA_F_NESTED
	attrTypeMask = 0x3fff // NLA_TYPE_MASK

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

	afInet  = 2  // AF_INET of include/linux/socket.h
	afInet6 = 10 // AF_INET6
)

var native = binary.NativeEndian

// afOf returns the address family's number.
func afOf(f tracker.Family) uint8 {
	if f == tracker.IPv6 {
		return afInet6
	}
	return afInet
}

// beginMessage appends the headers of a message to b. endMessage must be given
// their place, len(b) as it was before.
func beginMessage(b []byte, kind, flags uint16, seq uint32, family uint8) []byte {
	b = native.AppendUint32(b, 0)
	b = native.AppendUint16(b, kind)
	b = native.AppendUint16(b, flags)
	b = native.AppendUint32(b, seq)
	b = native.AppendUint32(b, 0)     // port: the kernel's
	return append(b, family, 0, 0, 0) // NFNETLINK_V0, res_id 0
}

// endMessage sets the length of the message at start.
func endMessage(b []byte, start int) []byte {
	native.PutUint32(b[start:], uint32(len(b)-start))
	return b
}

// appendAttr appends an attribute, padded.
func appendAttr(b []byte, kind uint16, value ...byte) []byte {
	b = native.AppendUint16(b, uint16(4+len(value)))
	b = native.AppendUint16(b, kind)
	b = append(b, value...)
	for len(b)%4 != 0 {
		b = append(b, 0)
	}
	return b
}

// appendNested appends an attribute that holds what f appends.
func appendNested(b []byte, kind uint16, f func([]byte) []byte) []byte {
	start := len(b)
	b = f(appendAttr(b, kind|attrNested))
	native.PutUint16(b[start:], uint16(len(b)-start))
	return b
}

// dumpRequest asks for the flows of a family in some zones. Kernels from 5.8 on
// leave out what is not UDP (CTA_FILTER); older ones do not know the attribute and
// report all. Only one zone can be asked for, by kernels from 6.8 on; older ones
// ignore the attribute. Zone 0 is not asked for, because a kernel without
// CONFIG_NF_CONNTRACK_ZONES refuses the attribute.
func dumpRequest(seq uint32, f tracker.Family, zones []uint16) []byte {
	b := beginMessage(nil, ctGet, flagRequest|flagDump, seq, afOf(f))
	b = appendNested(b, ctaTupleOrig, func(b []byte) []byte {
		return appendNested(b, ctaTupleProto, func(b []byte) []byte {
			return appendAttr(b, ctaProtoNum, protoUDP)
		})
	})
	b = appendNested(b, ctaFilter, func(b []byte) []byte {
		return appendAttr(b, ctaFilterOrigFlags, native.AppendUint32(nil, filterProtoNum)...)
	})
	if len(zones) == 1 && zones[0] != 0 {
		b = appendAttr(b, ctaZone, byte(zones[0]>>8), byte(zones[0]))
	}
	return endMessage(b, 0)
}

// appendTuple appends the addresses of one direction.
func appendTuple(b []byte, kind uint16, protocol uint8, src, dst netip.AddrPort) []byte {
	return appendNested(b, kind, func(b []byte) []byte {
		b = appendNested(b, ctaTupleIP, func(b []byte) []byte {
			from, to := uint16(ctaIPv4Src), uint16(ctaIPv4Dst)
			if dst.Addr().Is6() {
				from, to = ctaIPv6Src, ctaIPv6Dst
			}
			b = appendAttr(b, from, src.Addr().AsSlice()...)
			return appendAttr(b, to, dst.Addr().AsSlice()...)
		})
		return appendNested(b, ctaTupleProto, func(b []byte) []byte {
			b = appendAttr(b, ctaProtoNum, protocol)
			b = appendAttr(b, ctaProtoSrcPort, byte(src.Port()>>8), byte(src.Port()))
			return appendAttr(b, ctaProtoDstPort, byte(dst.Port()>>8), byte(dst.Port()))
		})
	})
}

// appendDelete appends a request to delete exactly the entry that f is.
func appendDelete(b []byte, seq uint32, f *Flow) []byte {
	start := len(b)
	b = beginMessage(b, ctDelete, flagRequest|flagAck, seq, afOf(tracker.FamilyOf(f.Dst.Addr())))
	b = appendTuple(b, ctaTupleOrig, f.Protocol, f.Src, f.Dst)
	if f.Zone != 0 && !f.ReplyZone { // the zone of the tuple given
		b = appendAttr(b, ctaZone, byte(f.Zone>>8), byte(f.Zone))
	}
	// With the ID a new entry between the same addresses is not taken for this one.
	b = appendAttr(b, ctaID, binary.BigEndian.AppendUint32(nil, f.ID)...)
	return endMessage(b, start)
}

// message is one netlink message.
type message struct {
	kind, flags uint16
	seq         uint32
	body        []byte // after the nlmsghdr
}

// nextMessage takes the first message off b.
func nextMessage(b []byte) (m message, rest []byte, err error) {
	if len(b) < nlmHeaderLen {
		return m, nil, fmt.Errorf("%w: %d bytes left", ErrMalformed, len(b))
	}
	n := native.Uint32(b)
	if n < nlmHeaderLen || uint64(n) > uint64(len(b)) {
		return m, nil, fmt.Errorf("%w: length %d of %d bytes", ErrMalformed, n, len(b))
	}
	m = message{
		kind:  native.Uint16(b[4:]),
		flags: native.Uint16(b[6:]),
		seq:   native.Uint32(b[8:]),
		body:  b[nlmHeaderLen:n],
	}
	return m, b[min(len(b), int(n+3)&^3):], nil
}

// err returns the error that an NLMSG_ERROR or NLMSG_DONE reports, nil if it is
// an acknowledgement, the plain end of a dump, or another kind of message.
func (m message) err() error {
	switch {
	case m.kind != nlmError && m.kind != nlmDone:
		return nil
	case len(m.body) >= 4:
		if n := int32(native.Uint32(m.body)); n != 0 {
			return syscall.Errno(-n)
		}
	case m.kind == nlmError:
		return fmt.Errorf("%w: error without a number", ErrMalformed)
	}
	return nil
}

// dump takes in the messages that answer a dumpRequest.
type dump struct {
	see         func(*Flow)
	zones       []uint16 // those reported; empty for zone 0 alone
	flow        Flow
	interrupted bool
}

// take reads one message and reports whether it is the last.
func (d *dump) take(m message) (last bool, err error) {
	d.interrupted = d.interrupted || m.flags&flagDumpIntr != 0
	if m.kind != ctNew {
		return m.kind == nlmDone || m.kind == nlmError, m.err()
	}
	if err := decodeFlow(m.body, &d.flow); err != nil {
		return false, err
	}
	// Kernels that do not filter report flows of other protocols and zones too.
	if d.flow.Protocol == protoUDP && inZones(d.zones, d.flow.Zone) {
		d.see(&d.flow)
	}
	return false, nil
}

// inZones reports whether zone is one of zones, which stands for zone 0 if it is
// empty.
func inZones(zones []uint16, zone uint16) bool {
	if len(zones) == 0 {
		return zone == 0
	}
	return slices.Contains(zones, zone)
}

// result returns what came of a dump that ended with err.
func (d *dump) result(err error) error {
	if errors.Is(err, syscall.EINTR) || err == nil && d.interrupted {
		return fmt.Errorf("%w: it changed too much while it was read", ErrIncomplete)
	}
	return err
}

// attrReader walks over attributes:
//
//	for r := (attrReader{rest: b}); r.next(); {
//
// and r.err tells whether that ended before the end.
type attrReader struct {
	kind  uint16
	value []byte
	rest  []byte
	err   error
}

func (r *attrReader) next() bool {
	if len(r.rest) == 0 || r.err != nil {
		return false
	}
	if len(r.rest) < 4 {
		return r.fail("attribute cut off")
	}
	n := int(native.Uint16(r.rest))
	if n < 4 || n > len(r.rest) {
		return r.fail("attribute of a wrong length")
	}
	r.kind, r.value = native.Uint16(r.rest[2:])&attrTypeMask, r.rest[4:n]
	r.rest = r.rest[min(len(r.rest), (n+3)&^3):]
	return true
}

func (r *attrReader) fail(why string) bool {
	if r.err == nil {
		r.err = fmt.Errorf("%w: %s (after type %d)", ErrMalformed, why, r.kind)
	}
	return false
}

// inside returns a reader of the attributes in the present one. outside must be
// given what it came to.
func (r *attrReader) inside() attrReader { return attrReader{rest: r.value} }

// outside takes over the error of a reader that inside returned.
func (r *attrReader) outside(in *attrReader) {
	if r.err == nil {
		r.err = in.err
	}
}

func (r *attrReader) uint8() uint8 {
	if len(r.value) != 1 {
		r.fail("not 1 byte")
		return 0
	}
	return r.value[0]
}

func (r *attrReader) uint16() uint16 {
	if len(r.value) != 2 {
		r.fail("not 2 bytes")
		return 0
	}
	return binary.BigEndian.Uint16(r.value)
}

func (r *attrReader) uint32() uint32 {
	if len(r.value) != 4 {
		r.fail("not 4 bytes")
		return 0
	}
	return binary.BigEndian.Uint32(r.value)
}

// addr reads an address of the given length in bytes.
func (r *attrReader) addr(length int) netip.Addr {
	if len(r.value) != length {
		r.fail("not an address")
		return netip.Addr{}
	}
	a, _ := netip.AddrFromSlice(r.value)
	return a
}

// decodeFlow reads the body of an IPCTNL_MSG_CT_NEW message into f, all of it.
func decodeFlow(body []byte, f *Flow) error {
	*f = Flow{}
	if len(body) < nfgenLen {
		return fmt.Errorf("%w: flow without a header", ErrMalformed)
	}
	r := attrReader{rest: body[nfgenLen:]}
	for r.next() {
		switch r.kind {
		case ctaTupleOrig:
			f.Src, f.Dst = decodeTuple(&r, f, false)
		case ctaTupleReply:
			f.ReplySrc, f.ReplyDst = decodeTuple(&r, f, true)
		case ctaID:
			f.ID = r.uint32()
		case ctaZone:
			f.Zone, f.ReplyZone = r.uint16(), false
		}
	}
	if r.err != nil {
		return r.err
	}
	family := tracker.FamilyOf(f.Src.Addr())
	for _, a := range [...]netip.Addr{f.Src.Addr(), f.Dst.Addr(), f.ReplySrc.Addr(), f.ReplyDst.Addr()} {
		if family == 0 || a.BitLen() != family.Bits() {
			return fmt.Errorf("%w: flow without four addresses of one family", ErrMalformed)
		}
	}
	return nil
}

// decodeTuple reads one direction, and into f what it says of the flow as a
// whole.
func decodeTuple(r *attrReader, f *Flow, reply bool) (src, dst netip.AddrPort) {
	var from, to netip.Addr
	var sport, dport uint16
	tuple := r.inside()
	for tuple.next() {
		part := tuple.inside()
		switch tuple.kind {
		case ctaTupleIP:
			for part.next() {
				switch part.kind {
				case ctaIPv4Src:
					from = part.addr(4)
				case ctaIPv4Dst:
					to = part.addr(4)
				case ctaIPv6Src:
					from = part.addr(16)
				case ctaIPv6Dst:
					to = part.addr(16)
				}
			}
		case ctaTupleProto:
			for part.next() {
				switch part.kind {
				case ctaProtoNum:
					f.Protocol = part.uint8()
				case ctaProtoSrcPort:
					sport = part.uint16()
				case ctaProtoDstPort:
					dport = part.uint16()
				}
			}
		case ctaTupleZone:
			f.Zone, f.ReplyZone = tuple.uint16(), reply
		}
		tuple.outside(&part)
	}
	r.outside(&tuple)
	return netip.AddrPortFrom(from, sport), netip.AddrPortFrom(to, dport)
}
