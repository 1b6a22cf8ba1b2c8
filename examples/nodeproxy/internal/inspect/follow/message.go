//go:build linux

package follow

import (
	"encoding/binary"
	"net/netip"

	"golang.org/x/sys/unix"

	"github.com/go-proxier/proxier/examples/internal/node/nft"
)

// message is a parsed NFT_MSG_TRACE: one step of a packet.
type message struct {
	id      uint32 // of the packet
	family  uint8  // of the table, NFPROTO_*
	table   string
	chain   string
	rule    uint64 // the rule's handle, 0 at the end of a base chain
	kind    uint32 // NFT_TRACETYPE_*
	verdict int32
	policy  uint32
	in, out uint32 // interfaces' indices, 0 if none
	// from and to are the packet's addresses. Only the first message of each base chain
	// has them.
	from, to netip.AddrPort
}

// parse parses the attributes of a message, which follow its nfgenmsg header.
func parse(family uint8, attrs []byte) message {
	m := message{family: family, verdict: -1}
	var network, transport []byte
	for typ, data := range nft.Attributes(attrs) {
		switch typ {
		case unix.NFTA_TRACE_TABLE:
			m.table = unix.ByteSliceToString(data)
		case unix.NFTA_TRACE_CHAIN:
			m.chain = unix.ByteSliceToString(data)
		case unix.NFTA_TRACE_RULE_HANDLE:
			m.rule = nft.Uint(data)
		case unix.NFTA_TRACE_TYPE:
			m.kind = uint32(nft.Uint(data))
		case unix.NFTA_TRACE_VERDICT:
			for typ, data := range nft.Attributes(data) {
				if typ == unix.NFTA_VERDICT_CODE {
					m.verdict = int32(nft.Uint(data))
				}
			}
		case unix.NFTA_TRACE_ID:
			m.id = uint32(nft.Uint(data))
		case unix.NFTA_TRACE_NETWORK_HEADER:
			network = data
		case unix.NFTA_TRACE_TRANSPORT_HEADER:
			transport = data
		case unix.NFTA_TRACE_IIF:
			m.in = uint32(nft.Uint(data))
		case unix.NFTA_TRACE_OIF:
			m.out = uint32(nft.Uint(data))
		case unix.NFTA_TRACE_POLICY:
			m.policy = uint32(nft.Uint(data))
		}
	}
	m.from, m.to = addresses(network, transport)
	return m
}

// addresses returns the source and destination of a packet. They are invalid if the headers
// are not complete.
func addresses(network, transport []byte) (from, to netip.AddrPort) {
	if len(network) == 0 || len(transport) < 4 {
		return from, to
	}
	saddr, n := 12, 4
	if network[0]>>4 == 6 {
		saddr, n = 8, 16
	}
	if len(network) < saddr+2*n {
		return from, to
	}
	addr := func(at int) netip.Addr {
		a, _ := netip.AddrFromSlice(network[at : at+n])
		return a
	}
	return netip.AddrPortFrom(addr(saddr), binary.BigEndian.Uint16(transport)),
		netip.AddrPortFrom(addr(saddr+n), binary.BigEndian.Uint16(transport[2:]))
}
