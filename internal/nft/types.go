package nft

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"strconv"
	"strings"

	v1 "k8s.io/api/core/v1"

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

// TypesOf returns the types in the number of a concatenation.
func TypesOf(typ uint32) (out []uint32) {
	for ; typ > 1<<typeBits && typ != DataVerdict; typ >>= typeBits {
		out = append([]uint32{typ & (1<<typeBits - 1)}, out...)
	}
	return append([]uint32{typ}, out...)
}

// TypeText returns the type of a key or of data as nft reads it.
func TypeText(typ uint32) string {
	var out []string
	for _, t := range TypesOf(typ) {
		name, _ := nameOf(t)
		out = append(out, name)
	}
	return strings.Join(out, " . ")
}

// ParseTypes returns the types that a text of TypeText names.
func ParseTypes(text string) (out []uint32, err error) {
	if text == "verdict" {
		return []uint32{DataVerdict}, nil
	}
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
	for _, t := range TypesOf(typ) {
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

// ParseValue returns the key or data of a type that a text of ValueText describes. Fields are padded to 32 bits.
func ParseValue(typ uint32, text string) (out []byte, err error) {
	types, fields := TypesOf(typ), strings.Split(text, " . ")
	if len(types) != len(fields) {
		return nil, fmt.Errorf("%q has %d fields, want %d", text, len(fields), len(types))
	}
	for i, t := range types {
		if out, err = appendField(out, t, fields[i]); err != nil {
			return nil, fmt.Errorf("%q is no %s: %w", fields[i], TypeText(t), err)
		}
		for len(out)%4 != 0 {
			out = append(out, 0)
		}
	}
	return out, nil
}

func appendField(b []byte, typ uint32, text string) ([]byte, error) {
	switch typ {
	case TypeIPv4, TypeIPv6:
		a, err := netip.ParseAddr(text)
		if err == nil && a.Is4() != (typ == TypeIPv4) {
			err = errors.New("another family")
		}
		return append(b, a.AsSlice()...), err
	case TypeProto:
		return append(b, inet.Protocol(v1.Protocol(strings.ToUpper(text)))), nil
	case TypePort:
		v, err := strconv.ParseUint(text, 10, 16)
		return binary.BigEndian.AppendUint16(b, uint16(v)), err
	case TypeIfname:
		return append(b, InterfaceName(strings.Trim(text, `"`))...), nil
	}
	if text == "none" {
		text = "0"
	}
	major, minor, classID := strings.Cut(text, ":")
	if !classID {
		v, err := strconv.ParseUint(text, 0, 32)
		return binary.NativeEndian.AppendUint32(b, uint32(v)), err
	}
	high, err := strconv.ParseUint(major, 16, 16)
	low, wrong := strconv.ParseUint(minor, 16, 16)
	return binary.NativeEndian.AppendUint32(b, uint32(high<<16|low)), errors.Join(err, wrong)
}
