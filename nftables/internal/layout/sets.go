package layout

import (
	"github.com/go-proxier/proxier/internal/nft"
	"github.com/go-proxier/proxier/tracker"
)

// Spec returns the attributes of the set in a table of the family. The nft tool loads
// a rule only if the types in it are those of its sets: see [Set.UserData].
func (s Set) Spec(f tracker.Family) nft.Spec {
	const proto, port, class, bucket = nft.TypeProto, nft.TypePort, nft.TypeClassID, nft.TypeInteger
	addr := uint32(nft.TypeIPv4)
	if f == tracker.IPv6 {
		addr = nft.TypeIPv6
	}
	var key, data []uint32
	var flags uint32
	switch s {
	case VersionSet:
		key = []uint32{nft.TypeMark}
	case ServiceIPs, InternalIPs:
		key, data = []uint32{addr, proto, port}, []uint32{class}
	case NodePorts, InternalNodePorts:
		key, data = []uint32{proto, port}, []uint32{class}
	case Handlers, InternalHandlers, OwnHandlers, StickyHandlers:
		key, data = []uint32{class}, []uint32{nft.DataVerdict}
	case Endpoints, UDPEndpoints, SCTPEndpoints:
		key, data = []uint32{class, bucket}, []uint32{addr, port}
	case StickyPools:
		key, data = []uint32{class}, []uint32{class}
	case StickyBuckets:
		key, data = []uint32{class, bucket}, []uint32{class}
	case StickyEndpoints:
		key, data = []uint32{class}, []uint32{addr, port}
	case StickyClients:
		key, data, flags = []uint32{class, addr}, []uint32{class}, nft.FlagTimeout|nft.FlagDynamic
	case Connections, Refused, Dropped:
		key, flags = []uint32{addr, proto, port}, nft.FlagDynamic
	case ClusterIPs:
		key = []uint32{addr}
	case Hairpin:
		key = []uint32{addr, addr}
	case FastPathInterfaces:
		key = []uint32{nft.TypeIfname}
	case NodePortIPs, ServiceCIDRs:
		key, flags = []uint32{addr}, nft.FlagInterval
	default:
		key = []uint32{addr, addr, proto, port}
	}
	sp := nft.Spec{Flags: flags}
	sp.KeyType, sp.KeyLen = nft.Concat(key...)
	if data != nil {
		sp.Flags |= nft.FlagMap
		sp.DataType, sp.DataLen = nft.Concat(data...)
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

// UserData returns a set's user data, which only the nft tool reads: the byte order of a class ID, mark or interface
// name that is not part of a concatenation, and the expressions by which the tool names the types of a map whose key
// has the number of a bucket: "typeof numgen random mod 1".
func (s Set) UserData(f tracker.Family) []byte {
	const hostOrder = 1
	sp := s.Spec(f)
	var out []byte
	for kind, typ := range [...]uint32{keyByteOrder: sp.KeyType, dataByteOrder: sp.DataType} {
		if typ == nft.TypeClassID || typ == nft.TypeMark || typ == nft.TypeIfname {
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

// TrafficSets returns the sets of counters. Their keys are the address, protocol and port that a client connects to.
// Rules add an element for the first packet to a destination, so a change of a Service adds no counters.
func TrafficSets() [3]Set { return [...]Set{Connections, Refused, Dropped} }
