//go:build linux

package nftables

import (
	"golang.org/x/sys/unix"

	"github.com/go-proxier/proxier/tracker"
)

// spec holds the attributes with which a set is created. Types are the nft tool's data types
// (nftables, include/datatype.h), which the kernel stores without attaching a meaning.
type spec struct {
	keyType, keyLen   uint32
	dataType, dataLen uint32 // dataType 0: a set, not a map
	flags             uint32
}

// field is a part of a key or of data: its type and length in bytes.
type field struct{ typ, len uint32 }

// The types in the machine's byte order.
const (
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

// spec returns the attributes of the set in a table of the family.
func (s set) spec(f tracker.Family) spec {
	addr, proto, port := field{7, 4}, field{12, 1}, field{13, 2} // ipv4_addr, inet_proto, inet_service
	mark, class, verdict := field{typeMark, 4}, field{typeClassID, 4}, field{unix.NFT_DATA_VERDICT, 0}
	if f == tracker.IPv6 {
		addr = field{8, 16} // ipv6_addr
	}
	var key, data []field
	var flags uint32
	switch s {
	case setLayout:
		key = []field{mark}
	case setServiceIPs, setInternalIPs:
		key, data = []field{addr, proto, port}, []field{class}
	case setNodePorts, setInternalNodePorts:
		key, data = []field{proto, port}, []field{class}
	case setHandlers, setInternalHandlers, setOwnHandlers, setStickyHandlers:
		key, data = []field{class}, []field{verdict}
	case setEndpoints:
		key, data = []field{class, mark}, []field{addr, port}
	case setStickyPools:
		key, data = []field{class}, []field{class}
	case setStickyBuckets:
		key, data = []field{class, mark}, []field{class}
	case setStickyEndpoints:
		key, data = []field{class}, []field{addr, port}
	case setStickyClients:
		key, data, flags = []field{class, addr}, []field{class}, unix.NFT_SET_TIMEOUT|unix.NFT_SET_EVAL
	case setConnections, setRefused, setDropped:
		key, flags = []field{addr, proto, port}, unix.NFT_SET_EVAL
	case setClusterIPs:
		key = []field{addr}
	case setHairpin:
		key = []field{addr, addr}
	case setFastPathInterfaces:
		key = []field{{typeIfname, unix.IFNAMSIZ}}
	case setNodePortIPs, setServiceCIDRs:
		key, flags = []field{addr}, unix.NFT_SET_INTERVAL
	default:
		key = []field{addr, addr, proto, port}
	}
	sp := spec{flags: flags}
	sp.keyType, sp.keyLen = concat(key)
	if data != nil {
		sp.flags |= unix.NFT_SET_MAP
		sp.dataType, sp.dataLen = concat(data)
	}
	return sp
}

// byteOrders returns a set's user data, by which the nft tool recognises keys or data in the
// machine's byte order (libnftnl, NFTNL_UDATA_SET_KEYBYTEORDER and _DATABYTEORDER). The tool
// needs it for a class ID, mark or interface name that is not part of a concatenation.
func (sp spec) byteOrders() []byte {
	const key, data, hostOrder = 0, 1, 1
	var out []byte
	for kind, typ := range [...]uint32{key: sp.keyType, data: sp.dataType} {
		if typ == typeClassID || typ == typeMark || typ == typeIfname {
			out = append(out, byte(kind), 4)
			out = append(out, word(hostOrder)...)
		}
	}
	return out
}
