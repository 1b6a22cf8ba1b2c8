package nfnl

import (
	"encoding/binary"
	"iter"
	"strings"
)

// Flags of an attribute's type (include/uapi/linux/netlink.h).
const (
	nested   = 1 << 15 // NLA_F_NESTED
	netOrder = 1 << 14 // NLA_F_NET_BYTEORDER
)

// Align returns the length of n bytes with their padding (NLA_ALIGNTO is 4).
func Align(n int) int { return (n + 3) &^ 3 }

// padding ends a string and fills an attribute up to a multiple of four bytes.
const padding = "\x00\x00\x00\x00"

// AppendHeader appends the header of an attribute with n bytes of data, which the
// caller appends next, padded.
func AppendHeader(b []byte, typ uint16, n int) []byte {
	b = binary.NativeEndian.AppendUint16(b, uint16(4+n))
	return binary.NativeEndian.AppendUint16(b, typ)
}

// AppendBytes appends an attribute of raw bytes.
func AppendBytes(b []byte, typ uint16, data []byte) []byte {
	b = append(AppendHeader(b, typ, len(data)), data...)
	return append(b, padding[:Align(len(data))-len(data)]...)
}

// AppendString appends an attribute of a NUL-terminated string.
func AppendString(b []byte, typ uint16, s string) []byte {
	b = append(AppendHeader(b, typ, len(s)+1), s...)
	return append(b, padding[:Align(len(s)+1)-len(s)]...)
}

// AppendUint8 appends an attribute of one byte.
func AppendUint8(b []byte, typ uint16, v uint8) []byte {
	return append(AppendHeader(b, typ, 1), v, 0, 0, 0)
}

// AppendUint16 appends an attribute of a big-endian 16-bit number.
func AppendUint16(b []byte, typ, v uint16) []byte {
	return append(binary.BigEndian.AppendUint16(AppendHeader(b, typ, 2), v), 0, 0)
}

// AppendUint32 appends an attribute of a big-endian 32-bit number.
func AppendUint32(b []byte, typ uint16, v uint32) []byte {
	return binary.BigEndian.AppendUint32(AppendHeader(b, typ, 4), v)
}

// AppendUint64 appends an attribute of a big-endian 64-bit number.
func AppendUint64(b []byte, typ uint16, v uint64) []byte {
	return binary.BigEndian.AppendUint64(AppendHeader(b, typ, 8), v)
}

// AppendNative32 appends an attribute of a 32-bit number in the machine's byte order.
func AppendNative32(b []byte, typ uint16, v uint32) []byte {
	return binary.NativeEndian.AppendUint32(AppendHeader(b, typ, 4), v)
}

// BeginNested appends the header of an attribute that holds attributes. The caller
// appends these attributes and then calls EndNested with the length that b had before.
func BeginNested(b []byte, typ uint16) []byte { return AppendHeader(b, typ|nested, 0) }

// EndNested sets the length of the attribute whose header is at start.
func EndNested(b []byte, start int) {
	binary.NativeEndian.PutUint16(b[start:], uint16(len(b)-start))
}

// Attributes returns the types, without flags, and the data of the attributes in b.
// It stops at the first malformed attribute. The data is part of b.
func Attributes(b []byte) iter.Seq2[uint16, []byte] {
	return func(yield func(uint16, []byte) bool) {
		for len(b) >= 4 {
			n, typ := int(binary.NativeEndian.Uint16(b)), binary.NativeEndian.Uint16(b[2:])
			if n < 4 || n > len(b) || !yield(typ&^(nested|netOrder), b[4:n]) {
				return
			}
			b = b[min(Align(n), len(b)):]
		}
	}
}

// Uint16 returns the big-endian number in an attribute's data, 0 if the data does not
// have two bytes.
func Uint16(data []byte) uint16 {
	if len(data) != 2 {
		return 0
	}
	return binary.BigEndian.Uint16(data)
}

// Uint32 returns the big-endian number in an attribute's data, 0 if the data does not
// have four bytes.
func Uint32(data []byte) uint32 {
	if len(data) != 4 {
		return 0
	}
	return binary.BigEndian.Uint32(data)
}

// Uint64 returns the big-endian number in an attribute's data, 0 if the data does not
// have eight bytes.
func Uint64(data []byte) uint64 {
	if len(data) != 8 {
		return 0
	}
	return binary.BigEndian.Uint64(data)
}

// String returns the string in an attribute's data, without the NULs at its end.
func String(data []byte) string { return strings.TrimRight(string(data), "\x00") }

// Keys of the expression ct (enum nft_ct_keys in linux/netfilter/nf_tables.h).
const (
	CtProtoDst = 12 // NFT_CT_PROTO_DST
	CtDstIP    = 20 // NFT_CT_DST_IP
	CtDstIP6   = 22 // NFT_CT_DST_IP6
)

// OriginalCt returns the attributes of an expression (NFTA_EXPR_NAME and _DATA) that loads a part of a connection's
// original direction into a register. The tagged releases of github.com/google/nftables encode the direction wrongly.
func OriginalCt(key, register uint32) []byte {
	const (
		exprName, exprData     = 1, 2    // NFTA_EXPR_NAME, NFTA_EXPR_DATA
		ctDreg, ctKey, ctDirec = 1, 2, 3 // NFTA_CT_DREG, NFTA_CT_KEY, NFTA_CT_DIRECTION
		original               = 0       // IP_CT_DIR_ORIGINAL
	)
	b := AppendString(nil, exprName, "ct")
	start := len(b)
	b = BeginNested(b, exprData)
	b = AppendUint32(b, ctKey, key)
	b = AppendUint32(b, ctDreg, register)
	b = AppendUint8(b, ctDirec, original)
	EndNested(b, start)
	return b
}
