package layout

import (
	"github.com/go-proxier/proxier/internal/nft"
	"github.com/go-proxier/proxier/tracker"
)

// Flags of sets (include/uapi/linux/netfilter/nf_tables.h: NFT_SET_*).
const (
	FlagMap     = 0x8
	setInterval = 0x4
	setTimeout  = 0x10
	setEval     = 0x20
)

// interfaceNameLen is the length of an interface's name in a key (IFNAMSIZ of linux/if.h).
const interfaceNameLen = 16

// field is a part of a key or of data: its type and length in bytes.
type field struct{ typ, len uint32 }

// The types of nft (nftables, include/datatype.h). Numbers, marks, class IDs and names of interfaces are
// in the machine's byte order.
const (
	typeInteger = 4
	typeIPv4    = 7  // ipv4_addr
	typeIPv6    = 8  // ipv6_addr
	typeProto   = 12 // inet_proto
	typePort    = 13 // inet_service
	typeMark    = 19
	typeClassID = 23
	typeIfname  = 41
)

// typeBits is the number of bits of each type in the type of a concatenation.
const typeBits = 6

func concat(fields []field) (typ, length uint32) {
	for _, f := range fields {
		typ = typ<<typeBits | f.typ
		length += (f.len + 3) &^ 3
	}
	return typ, length
}

// Spec returns the attributes of the set in a table of the family. The nft tool loads
// a rule only if the types in it are those of its sets: see [Set.UserData].
func (s Set) Spec(f tracker.Family) nft.Spec {
	addr, proto, port := field{typeIPv4, 4}, field{typeProto, 1}, field{typePort, 2}
	mark, class, verdict := field{typeMark, 4}, field{typeClassID, 4}, field{nft.DataVerdict, 0}
	bucket := field{typeInteger, 4}
	if f == tracker.IPv6 {
		addr = field{typeIPv6, 16}
	}
	var key, data []field
	var flags uint32
	switch s {
	case VersionSet:
		key = []field{mark}
	case ServiceIPs, InternalIPs:
		key, data = []field{addr, proto, port}, []field{class}
	case NodePorts, InternalNodePorts:
		key, data = []field{proto, port}, []field{class}
	case Handlers, InternalHandlers, OwnHandlers, StickyHandlers:
		key, data = []field{class}, []field{verdict}
	case Endpoints, UDPEndpoints, SCTPEndpoints:
		key, data = []field{class, bucket}, []field{addr, port}
	case StickyPools:
		key, data = []field{class}, []field{class}
	case StickyBuckets:
		key, data = []field{class, bucket}, []field{class}
	case StickyEndpoints:
		key, data = []field{class}, []field{addr, port}
	case StickyClients:
		key, data, flags = []field{class, addr}, []field{class}, setTimeout|setEval
	case Connections, Refused, Dropped:
		key, flags = []field{addr, proto, port}, setEval
	case ClusterIPs:
		key = []field{addr}
	case Hairpin:
		key = []field{addr, addr}
	case FastPathInterfaces:
		key = []field{{typeIfname, interfaceNameLen}}
	case NodePortIPs, ServiceCIDRs:
		key, flags = []field{addr}, setInterval
	default:
		key = []field{addr, addr, proto, port}
	}
	sp := nft.Spec{Flags: flags}
	sp.KeyType, sp.KeyLen = concat(key)
	if data != nil {
		sp.Flags |= FlagMap
		sp.DataType, sp.DataLen = concat(data)
	}
	return sp
}

// The user data of a set in a table of nft (libnftnl, NFTNL_UDATA_SET_*).
const (
	keyByteOrder  = 0
	dataByteOrder = 1
	keyTypeof     = 3
	dataTypeof    = 4
)

// UserData returns a set's user data, which only the nft tool reads. It has the byte order of a class
// ID, mark or interface name that is not part of a concatenation, and the expressions by which the
// tool names the types of a map whose key has the number of a bucket: "typeof numgen random mod 1".
func (s Set) UserData(f tracker.Family) []byte {
	const hostOrder = 1
	sp := s.Spec(f)
	var out []byte
	for kind, typ := range [...]uint32{keyByteOrder: sp.KeyType, dataByteOrder: sp.DataType} {
		if typ == typeClassID || typ == typeMark || typ == typeIfname {
			out = append(out, tlv32(byte(kind), hostOrder)...)
		}
	}
	var data []byte
	switch s {
	case Endpoints:
		data = concatExpr(daddrExpr(f), portExpr(descTCP))
	case UDPEndpoints:
		data = concatExpr(daddrExpr(f), portExpr(descUDP))
	case SCTPEndpoints:
		data = concatExpr(daddrExpr(f), portExpr(descSCTP))
	case StickyBuckets:
		data = priorityExpr()
	default:
		return out
	}
	out = append(out, tlv(keyTypeof, concatExpr(priorityExpr(), numberExpr()))...)
	return append(out, tlv(dataTypeof, data)...)
}

// Interval reports whether the set holds ranges of addresses.
func (s Set) Interval() bool { return s == NodePortIPs || s == ServiceCIDRs }

// Verdicts reports whether the set is a map from handlers to chains.
func (s Set) Verdicts() bool {
	return s == Handlers || s == InternalHandlers || s == OwnHandlers || s == StickyHandlers
}

// Counted reports whether the packets to the keys of the set are counted.
func (s Set) Counted() bool { return s == ServiceIPs || s == NodePorts }

// Counts reports whether the set holds counters.
func (s Set) Counts() bool { return s == Connections || s == Refused || s == Dropped }

// TrafficSets returns the sets of counters. Their keys are the address, protocol and port that a
// client connects to. Rules add an element for the first packet to a destination. So an unused
// frontend takes no memory, and a change of a Service adds no counters.
func TrafficSets() [3]Set { return [...]Set{Connections, Refused, Dropped} }
