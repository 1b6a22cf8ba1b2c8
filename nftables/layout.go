//go:build linux

package nftables

import (
	"encoding/binary"
	"fmt"
	"net/netip"
	"time"

	"golang.org/x/sys/unix"

	"github.com/go-proxier/proxier/tracker"
)

// layoutVersion changes whenever a table programmed by an older version of this
// package cannot be taken over in place.
const layoutVersion = 2

// The chains that are always there. The base chains carry the names and
// priorities that kube-proxy's nftables mode gives to those with their purpose.
const (
	chainNATPrerouting   = "nat-prerouting"
	chainNATOutput       = "nat-output"
	chainPreroutingAgain = "nat-prerouting-again"
	chainOutputAgain     = "nat-output-again"
	chainNATPostrouting  = "nat-postrouting"
	chainFilterForward   = "filter-forward"
	chainFilterOutput    = "filter-output"

	chainServices         = "services"
	chainNodePorts        = "nodeports"
	chainInternal         = "internal"
	chainFirewallCheck    = "firewall-check"
	chainClusterIPs       = "cluster-ips-check"
	chainMasquerading     = "masquerading"
	chainNoEndpoints      = "no-endpoints"
	chainNoLocalEndpoints = "no-local-endpoints"
)

// A set is one of the table's named sets and maps.
type set uint8

// The table's sets. firstAllowed and those behind it are one set for each prefix
// length that load-balancer source ranges have.
const (
	setLayout set = iota
	setServiceIPs
	setNodePorts
	setInternalIPs
	setInternalNodePorts
	setHandlers
	setInternalHandlers
	setEndpoints
	setStickyBuckets
	setStickyEndpoints
	setStickyClients
	setClusterIPs
	setHairpin
	setNodePortIPs
	setServiceCIDRs
	firstAllowed

	setCount = firstAllowed + 129
)

// allowed is the set of sources with prefixes of the given length.
func allowed(bits int) set { return firstAllowed + set(bits) }

// name is the set's name in the table.
func (s set) name() string {
	switch s {
	case setLayout:
		return "layout"
	case setServiceIPs:
		return "service-ips"
	case setNodePorts:
		return "service-nodeports"
	case setInternalIPs:
		return "internal-service-ips"
	case setInternalNodePorts:
		return "internal-service-nodeports"
	case setHandlers:
		return "handlers"
	case setInternalHandlers:
		return "internal-handlers"
	case setEndpoints:
		return "endpoints"
	case setStickyBuckets:
		return "sticky-buckets"
	case setStickyEndpoints:
		return "sticky-endpoints"
	case setStickyClients:
		return "sticky-clients"
	case setClusterIPs:
		return "cluster-ips"
	case setHairpin:
		return "hairpin-connections"
	case setNodePortIPs:
		return "nodeport-ips"
	case setServiceCIDRs:
		return "service-cidrs"
	}
	return fmt.Sprintf("allowed-sources-%d", s-firstAllowed)
}

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
	case setHandlers, setInternalHandlers:
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

// What a frontend's map element holds, and the rules keep in the packet's
// priority between two look-ups, is a dispatch key: 32 bits that say what is to be
// done with the connection. The priority is used because it is the one field of
// a packet that rules can write, read and look up, and that nobody relies on at
// this point: nft cannot list a rule that passes a looked-up value on in a
// register. It is put back before the packet leaves (see restore in rules.go).
//
//	bit 31      always set, so that a rule can tell a dispatch key from a priority
//	bits 20-30  the handler: which chain handles it
//	bits 0-19   the number of the pool
//
// A sticky pool's number is 16 bits with the highest set; its chain shifts it up,
// which again has bit 31 set, and makes room for the number of an endpoint in the
// lower half.
const (
	dispatchMark = 1 << 31
	handlerShift = 20
	maxHandler   = 1<<11 - 1
	handlerMask  = dispatchMark | maxHandler<<handlerShift
	maxPool      = 1<<handlerShift - 1
	poolMask     = maxPool
	stickyMark   = 1 << 15
	maxSticky    = stickyMark - 1
	stickyShift  = 16
	stickyMask   = 0xffff << stickyShift
	// maxStickyEndpoints is how many endpoints a Service with client affinity can
	// have.
	maxStickyEndpoints = 1<<stickyShift - 1
)

func dispatchKey(handler, pool uint32) uint32 { return dispatchMark | handler<<handlerShift | pool }

// bucketsFor returns the number of buckets that a pool of n endpoints draws from: n
// itself up to 16 and then the next of four steps between powers of two, so that
// the number of chains stays small however many sizes there are. A draw that
// hits none of the n is repeated.
func bucketsFor(n int) int {
	if n <= exactBuckets {
		return n
	}
	step := exactBuckets / 4
	for n > 8*step {
		step *= 2
	}
	return (n + step - 1) / step * step
}

// bucketsBelow returns the largest number of buckets less than that of a pool whose
// bucketsFor is buckets: a pool has at least one endpoint more than that.
func bucketsBelow(buckets int) int {
	if buckets <= exactBuckets+1 {
		return buckets - 1
	}
	step := exactBuckets / 4
	for buckets > 8*step {
		step *= 2
	}
	return buckets - step
}

const exactBuckets = 16

// key buffers. The widest key is that of allowed sources of IPv6.
type buffer [64]byte

func (b *buffer) addr(at int, a netip.Addr) int {
	if a.Is4() {
		v := a.As4()
		return at + copy(b[at:], v[:])
	}
	v := a.As16()
	return at + copy(b[at:], v[:])
}

func (b *buffer) word(at int, v uint32) int {
	binary.NativeEndian.PutUint32(b[at:], v)
	return at + 4
}

func (b *buffer) proto(at int, p uint8) int {
	b[at], b[at+1], b[at+2], b[at+3] = p, 0, 0, 0
	return at + 4
}

func (b *buffer) port(at int, p uint16) int {
	b[at], b[at+1], b[at+2], b[at+3] = byte(p>>8), byte(p), 0, 0
	return at + 4
}

// seconds is how an affinity timeout is written in a chain's name and in a rule:
// the kernel would do with milliseconds, Kubernetes has only seconds.
//
// Kubernetes has at most a day (v1.ClientIPConfig.TimeoutSeconds); maxAffinity is
// one whose name is no shorter.
func seconds(d time.Duration) int64 { return int64((d + time.Second - 1) / time.Second) }

const maxAffinity = 86400 * time.Second
