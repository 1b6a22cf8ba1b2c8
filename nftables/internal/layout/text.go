package layout

import (
	"encoding/binary"
	"fmt"
	"net/netip"
	"strings"

	"github.com/go-proxier/proxier/internal/inet"
	"github.com/go-proxier/proxier/internal/nft"
	"github.com/go-proxier/proxier/tracker"
)

// typeNames holds the tool's names of types.
var typeNames = map[uint32]string{
	typeInteger: "integer", typeIPv4: "ipv4_addr", typeIPv6: "ipv6_addr", typeProto: "inet_proto", typePort: "inet_service",
	typeMark: "mark", typeClassID: "classid", typeIfname: "ifname", nft.DataVerdict: "verdict",
}

// typesOf returns the types in the type of a concatenation.
func typesOf(typ uint32) (out []uint32) {
	for ; typ > 1<<typeBits && typ != nft.DataVerdict; typ >>= typeBits {
		out = append([]uint32{typ & (1<<typeBits - 1)}, out...)
	}
	return append([]uint32{typ}, out...)
}

// Types returns the types of a set's keys and data as nft reads them.
func (s Set) Types(f tracker.Family) string {
	daddr := "ip daddr"
	if f == tracker.IPv6 {
		daddr = "ip6 daddr"
	}
	const bucket = "typeof meta priority . numgen random mod 1 : "
	switch s {
	case Endpoints:
		return bucket + daddr + " . tcp dport"
	case UDPEndpoints:
		return bucket + daddr + " . udp dport"
	case SCTPEndpoints:
		return bucket + daddr + " . sctp dport"
	case StickyBuckets:
		return bucket + "meta priority"
	}
	names := func(typ uint32) string {
		var out []string
		for _, t := range typesOf(typ) {
			out = append(out, typeNames[t])
		}
		return strings.Join(out, " . ")
	}
	sp := s.Spec(f)
	out := "type " + names(sp.KeyType)
	if sp.DataType != 0 {
		out += " : " + names(sp.DataType)
	}
	return out
}

// Flags returns the names of a set's flags.
func (s Set) Flags(f tracker.Family) (out []string) {
	flags := s.Spec(f).Flags
	for _, flag := range []struct {
		bit  uint32
		name string
	}{{setInterval, "interval"}, {setEval, "dynamic"}, {setTimeout, "timeout"}} {
		if flags&flag.bit != 0 {
			out = append(out, flag.name)
		}
	}
	return out
}

// Text returns a key or data of a type.
func Text(typ uint32, value []byte) string {
	var out []string
	for _, t := range typesOf(typ) {
		n := min(typeLength(t), len(value))
		out = append(out, fieldText(t, value[:n]))
		value = value[min((n+3)&^3, len(value)):]
	}
	return strings.Join(out, " . ")
}

func typeLength(typ uint32) int {
	switch typ {
	case typeIPv6:
		return 16
	case typeIfname:
		return interfaceNameLen
	case typeProto:
		return 1
	case typePort:
		return 2
	}
	return 4
}

func fieldText(typ uint32, b []byte) string {
	switch typ {
	case typeIPv4, typeIPv6:
		a, _ := netip.AddrFromSlice(b)
		return a.String()
	case typeProto:
		return strings.ToLower(string(inet.ProtocolOf(b[0])))
	case typePort:
		return fmt.Sprint(binary.BigEndian.Uint16(b))
	case typeIfname:
		return `"` + strings.TrimRight(string(b), "\x00") + `"`
	case typeMark:
		return fmt.Sprintf("0x%08x", binary.NativeEndian.Uint32(b))
	case typeClassID:
		v := binary.NativeEndian.Uint32(b)
		return fmt.Sprintf("%x:%x", v>>16, v&0xffff)
	}
	return fmt.Sprint(binary.NativeEndian.Uint32(b))
}
