//go:build linux

package follow

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"time"

	"github.com/mdlayher/netlink"
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

// listen returns a socket that receives the messages of a group.
func listen(group uint32) (*netlink.Conn, error) {
	c, err := netlink.Dial(unix.NETLINK_NETFILTER, nil)
	if err != nil {
		return nil, unsupported("open a netlink socket", err)
	}
	if err := c.JoinGroup(group); err != nil {
		c.Close()
		return nil, unsupported("receive the kernel's messages", err)
	}
	// If this fails, the default buffer is enough for a few packets.
	_ = c.SetReadBuffer(receiveBuffer)
	return c, nil
}

// receive calls fn with the messages of a socket until fn returns false or the context ends.
// Without messages it calls fn several times a second. It counts overruns of the buffer.
func receive(ctx context.Context, c *netlink.Conn, overrun *int, fn func([]netlink.Message) (more bool)) error {
	for more := true; more && ctx.Err() == nil; {
		if err := c.SetReadDeadline(time.Now().Add(idle / 10)); err != nil {
			return err
		}
		list, err := c.Receive()
		switch {
		case errors.Is(err, os.ErrDeadlineExceeded):
		case errors.Is(err, unix.ENOBUFS):
			*overrun++
		case err != nil:
			return fmt.Errorf("cannot receive the kernel's messages: %w", err)
		}
		more = fn(list)
	}
	return nil
}

// unsupported returns an error with what failed. It wraps errors.ErrUnsupported if err means
// that the kernel lacks a feature.
func unsupported(what string, err error) error {
	for _, e := range []error{unix.EPROTONOSUPPORT, unix.EOPNOTSUPP, unix.EAFNOSUPPORT, unix.EINVAL, unix.ENOENT} {
		if errors.Is(err, e) {
			return fmt.Errorf("cannot %s: %w: %w", what, errors.ErrUnsupported, err)
		}
	}
	return fmt.Errorf("cannot %s: %w", what, err)
}
