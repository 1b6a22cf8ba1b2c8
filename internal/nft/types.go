package nft

import (
	"encoding/binary"
	"fmt"
	"net/netip"
	"strings"

	"github.com/go-proxier/proxier/internal/inet"
)

// The nft tool's numbers of data types (nftables, include/datatype.h). Numbers, marks, class IDs and names of
// interfaces are in the machine's byte order.
const (
	TypeInteger = 4
	TypeIPv4    = 7
	TypeIPv6    = 8
	TypeProto   = 12
	TypePort    = 13
	TypeMark    = 19
	TypeClassID = 23
	TypeIfname  = 41
)

// typeBits is the number of bits of each type in the type of a concatenation (TYPE_BITS in nft's
// include/datatype.h).
const typeBits = 6

// nameOf returns the tool's name of a type and the length of its values in bytes.
func nameOf(typ uint32) (name string, length int) {
	switch typ {
	case TypeInteger:
		return "integer", 4
	case TypeIPv4:
		return "ipv4_addr", 4
	case TypeIPv6:
		return "ipv6_addr", 16
	case TypeProto:
		return "inet_proto", 1
	case TypePort:
		return "inet_service", 2
	case TypeMark:
		return "mark", 4
	case TypeClassID:
		return "classid", 4
	case TypeIfname:
		return "ifname", 16 // IFNAMSIZ of linux/if.h
	case DataVerdict:
		return "verdict", 0
	}
	return "", 0
}

// Concat returns the number of a concatenation of types, and the length of its values in bytes.
func Concat(types ...uint32) (typ, length uint32) {
	for _, t := range types {
		_, n := nameOf(t)
		typ = typ<<typeBits | t
		length += uint32(n+3) &^ 3
	}
	return typ, length
}

// typesOf returns the types in the number of a concatenation.
func typesOf(typ uint32) (out []uint32) {
	for ; typ > 1<<typeBits && typ != DataVerdict; typ >>= typeBits {
		out = append([]uint32{typ & (1<<typeBits - 1)}, out...)
	}
	return append([]uint32{typ}, out...)
}

// TypeText returns the type of a key or of data as nft reads it.
func TypeText(typ uint32) string {
	var out []string
	for _, t := range typesOf(typ) {
		name, _ := nameOf(t)
		out = append(out, name)
	}
	return strings.Join(out, " . ")
}

// parseTypes returns the types that a text of TypeText names.
func parseTypes(text string) (out []uint32, err error) {
	for want := range strings.SplitSeq(text, " . ") {
		t := uint32(1)
		for name, _ := nameOf(t); name != want && t < 1<<typeBits; name, _ = nameOf(t) {
			t++
		}
		if t == 1<<typeBits {
			return nil, fmt.Errorf("unknown type %q", want)
		}
		out = append(out, t)
	}
	return out, nil
}

// ValueText returns a key or data of a type as nft reads it.
func ValueText(typ uint32, value []byte) string {
	var out []string
	for _, t := range typesOf(typ) {
		_, n := nameOf(t)
		n = min(n, len(value))
		out = append(out, fieldText(t, value[:n]))
		value = value[min((n+3)&^3, len(value)):]
	}
	return strings.Join(out, " . ")
}

func fieldText(typ uint32, b []byte) string {
	switch typ {
	case TypeIPv4, TypeIPv6:
		a, _ := netip.AddrFromSlice(b)
		return a.String()
	case TypeProto:
		return strings.ToLower(string(inet.ProtocolOf(b[0])))
	case TypePort:
		return fmt.Sprint(binary.BigEndian.Uint16(b))
	case TypeIfname:
		return `"` + strings.TrimRight(string(b), "\x00") + `"`
	case TypeMark:
		return fmt.Sprintf("0x%08x", binary.NativeEndian.Uint32(b))
	case TypeClassID:
		v := binary.NativeEndian.Uint32(b)
		return fmt.Sprintf("%x:%x", v>>16, v&0xffff)
	}
	return fmt.Sprint(binary.NativeEndian.Uint32(b))
}
