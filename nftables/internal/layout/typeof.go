package layout

import (
	"encoding/binary"
	"slices"

	"github.com/go-proxier/proxier/tracker"
)

// The nft tool stores an expression in a set's user data as its type and data (nftables, include/expression.h, enum
// expr_types; src/expression.c). Numbers are in the machine's byte order.
const (
	exprPayload = 7
	exprMeta    = 9
	exprConcat  = 13
	exprNumgen  = 23

	// include/proto.h: PROTO_DESC_*, and the number of a field of the header.
	descUDP, descTCP, descSCTP, dstPort = 6, 8, 10, 2
	descIP, ipDstAddr                   = 12, 12
	descIP6, ip6DstAddr                 = 13, 9
	metaPriority                        = 2 // linux/netfilter/nf_tables.h: NFT_META_PRIORITY
	numgenRandom                        = 1 // NFT_NG_RANDOM
)

func tlv(typ byte, data ...[]byte) []byte {
	all := slices.Concat(data...)
	return append([]byte{typ, byte(len(all))}, all...)
}

func tlv32(typ byte, v uint32) []byte {
	return tlv(typ, binary.NativeEndian.AppendUint32(nil, v))
}

func typeofExpr(typ uint32, data ...[]byte) []byte {
	return slices.Concat(tlv32(0, typ), tlv(1, data...))
}

func concatExpr(parts ...[]byte) []byte {
	var nested [][]byte
	for i, p := range parts {
		nested = append(nested, tlv(byte(i), p))
	}
	return typeofExpr(exprConcat, nested...)
}

// priorityExpr is "meta priority", the type of a class ID.
func priorityExpr() []byte { return typeofExpr(exprMeta, tlv32(0, metaPriority)) }

// numberExpr is "numgen random mod 1", a number of 32 bits.
func numberExpr() []byte {
	return typeofExpr(exprNumgen, tlv32(0, numgenRandom), tlv32(1, 1), tlv32(2, 0))
}

// daddrExpr is "ip daddr" or "ip6 daddr". portExpr is the destination port of a protocol, such as
// "tcp dport".
func daddrExpr(f tracker.Family) []byte {
	if f == tracker.IPv6 {
		return typeofExpr(exprPayload, tlv32(0, descIP6), tlv32(1, ip6DstAddr))
	}
	return typeofExpr(exprPayload, tlv32(0, descIP), tlv32(1, ipDstAddr))
}

func portExpr(protocol uint32) []byte {
	return typeofExpr(exprPayload, tlv32(0, protocol), tlv32(1, dstPort))
}
