//go:build linux

package nftables

import (
	"golang.org/x/sys/unix"

	"github.com/go-proxier/proxier/tracker"
)

// The nft tool's data types (nftables, include/datatype.h): the kernel keeps
// them for it and attaches no meaning to them.
const (
	typeIPv4    = 7
	typeIPv6    = 8
	typeProto   = 12
	typeService = 13
	typeMark    = 19
	typeClassID = 23

	typeBits = 6 // of each type in a concatenation
)

// spec is what a set is created with.
type spec struct {
	keyType, keyLen   uint32
	dataType, dataLen uint32 // dataType 0: a set, not a map
	flags             uint32
}

// field is one part of a concatenation.
type field struct {
	typ, len uint32
}

func concat(fields ...field) (typ, length uint32) {
	for _, f := range fields {
		typ = typ<<typeBits | f.typ
		length += (f.len + 3) &^ 3
	}
	return typ, length
}

// spec returns how the set is made in a table of the family.
func (s set) spec(f tracker.Family) spec {
	addr := field{typeIPv4, 4}
	if f == tracker.IPv6 {
		addr = field{typeIPv6, 16}
	}
	var (
		proto   = field{typeProto, 1}
		port    = field{typeService, 2}
		handler = field{typeClassID, 4}
		bucket  = field{typeMark, 4}
		none    []field
		key     []field
		data    []field
		flags   uint32
		verdict bool
	)
	switch s {
	case setLayout:
		key, data = []field{bucket}, none
	case setServiceIPs, setInternalIPs:
		key, data = []field{addr, proto, port}, []field{handler}
	case setNodePorts, setInternalNodePorts:
		key, data = []field{proto, port}, []field{handler}
	case setHandlers, setInternalHandlers, setOwnHandlers:
		key, verdict = []field{handler}, true
	case setEndpoints:
		key, data = []field{handler, bucket}, []field{addr, port}
	case setStickyBuckets:
		key, data = []field{handler, bucket}, []field{handler}
	case setStickyEndpoints:
		key, data = []field{handler}, []field{addr, port}
	case setStickyClients:
		key, data = []field{handler, addr}, []field{handler}
		flags = unix.NFT_SET_TIMEOUT | unix.NFT_SET_EVAL
	case setClusterIPs:
		key = []field{addr}
	case setHairpin:
		key = []field{addr, addr}
	case setNodePortIPs, setServiceCIDRs:
		key, flags = []field{addr}, unix.NFT_SET_INTERVAL
	default:
		key = []field{addr, addr, proto, port}
	}
	sp := spec{flags: flags}
	sp.keyType, sp.keyLen = concat(key...)
	switch {
	case verdict:
		sp.flags |= unix.NFT_SET_MAP
		sp.dataType, sp.dataLen = unix.NFT_DATA_VERDICT, 0
	case len(data) != 0:
		sp.flags |= unix.NFT_SET_MAP
		sp.dataType, sp.dataLen = concat(data...)
	}
	return sp
}

// byteOrders is a set's user data by which the nft tool (libnftnl,
// NFTNL_UDATA_SET_KEYBYTEORDER and _DATABYTEORDER) knows that keys or data are
// numbers in the kernel's own byte order, where their type leaves that open: a
// class or mark that is not part of a concatenation.
func (sp spec) byteOrders() []byte {
	const key, data, hostOrder = 0, 1, 1
	var out []byte
	for kind, typ := range [...]uint32{key: sp.keyType, data: sp.dataType} {
		if typ == typeClassID || typ == typeMark {
			out = append(out, byte(kind), 4)
			out = append(out, word(hostOrder)...)
		}
	}
	return out
}
