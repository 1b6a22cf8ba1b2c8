//go:build linux

package follow

import (
	"fmt"
	"math"
	"os"

	"github.com/google/nftables/expr"
	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"

	"github.com/go-proxier/proxier/examples/internal/node/nft"
)

// The chains of the table, named after their hooks.
const (
	chainPrerouting  = "prerouting"
	chainOutput      = "output"
	chainInput       = "input"
	chainPostrouting = "postrouting"
)

// perSecond limits how many packets a second are followed, so that tracing does not slow a
// busy destination down. The kernel writes some twenty messages for each packet.
const perSecond = 100

// flagOwner makes the kernel remove a table with its socket (linux/netfilter/nf_tables.h,
// NFT_TABLE_F_OWNER).
const flagOwner = 2

// tableName returns the name of this process's table.
func tableName() string { return fmt.Sprintf("proxier-trace-%d", os.Getpid()) }

// install adds the table to the kernel. The kernel removes it when c is closed.
func install(c *nft.Conn, f Filter) error {
	family := byte(unix.NFPROTO_IPV4)
	if f.To.Addr().Is6() {
		family = unix.NFPROTO_IPV6
	}
	var mark []netlink.Attribute
	for _, e := range f.exprs() {
		data, err := expr.Marshal(family, e)
		if err != nil {
			return err
		}
		mark = append(mark, netlink.Attribute{Type: unix.NFTA_LIST_ELEM | unix.NLA_F_NESTED, Data: data})
	}
	var list []nft.Request
	add := func(typ uint16, flags netlink.HeaderFlags, attrs ...netlink.Attribute) {
		attrs = append(attrs, nft.String(unix.NFTA_TABLE_NAME, tableName())) // the number is the same for each type
		list = append(list, nft.Request{Type: typ, Family: family, Flags: netlink.Create | flags, Attrs: attrs})
	}
	add(unix.NFT_MSG_NEWTABLE, 0, nft.Uint32(unix.NFTA_TABLE_FLAGS, flagOwner))
	chain := func(name string, hook uint32, priority int32) {
		add(unix.NFT_MSG_NEWCHAIN, 0, nft.String(unix.NFTA_CHAIN_NAME, name), nft.String(unix.NFTA_CHAIN_TYPE, "filter"),
			nft.Nested(unix.NFTA_CHAIN_HOOK, nft.Uint32(unix.NFTA_HOOK_HOOKNUM, hook), nft.Uint32(unix.NFTA_HOOK_PRIORITY, uint32(priority))))
	}
	// The first two chains mark packets before any other chain. The last two show the final
	// addresses of packets; only connection tracking, which confirms connections, runs
	// later.
	chain(chainPrerouting, unix.NF_INET_PRE_ROUTING, math.MinInt32)
	chain(chainOutput, unix.NF_INET_LOCAL_OUT, math.MinInt32)
	for _, first := range []string{chainPrerouting, chainOutput} {
		add(unix.NFT_MSG_NEWRULE, netlink.Append, nft.String(unix.NFTA_RULE_CHAIN, first), nft.Nested(unix.NFTA_RULE_EXPRESSIONS, mark...))
	}
	chain(chainInput, unix.NF_INET_LOCAL_IN, math.MaxInt32-1)
	chain(chainPostrouting, unix.NF_INET_POST_ROUTING, math.MaxInt32-1)
	return c.Commit(list...)
}

// exprs returns the expressions of the rule that marks packets.
func (f Filter) exprs() []expr.Any {
	saddr, daddr := uint32(12), uint32(16) // offsets in the IPv4 header
	if f.To.Addr().Is6() {
		saddr, daddr = 8, 24
	}
	var out []expr.Any
	match := func(base expr.PayloadBase, offset uint32, data []byte) {
		out = append(out,
			&expr.Payload{DestRegister: 1, Base: base, Offset: offset, Len: uint32(len(data))},
			&expr.Cmp{Op: expr.CmpOpEq, Register: 1, Data: data})
	}
	port := func(p uint16) []byte { return []byte{byte(p >> 8), byte(p)} }
	match(expr.PayloadBaseNetworkHeader, daddr, f.To.Addr().AsSlice())
	if f.From.Addr().IsValid() {
		match(expr.PayloadBaseNetworkHeader, saddr, f.From.Addr().AsSlice())
	}
	out = append(out,
		&expr.Meta{Key: expr.MetaKeyL4PROTO, Register: 1},
		&expr.Cmp{Op: expr.CmpOpEq, Register: 1, Data: []byte{f.Protocol}})
	match(expr.PayloadBaseTransportHeader, 2, port(f.To.Port()))
	if f.From.Port() != 0 {
		match(expr.PayloadBaseTransportHeader, 0, port(f.From.Port()))
	}
	switch f.Protocol {
	case unix.IPPROTO_TCP:
		const offset, syn, ack = 13, 2, 16 // RFC 9293
		out = append(out,
			&expr.Payload{DestRegister: 1, Base: expr.PayloadBaseTransportHeader, Offset: offset, Len: 1},
			&expr.Bitwise{SourceRegister: 1, DestRegister: 1, Len: 1, Mask: []byte{syn | ack}, Xor: []byte{0}},
			&expr.Cmp{Op: expr.CmpOpEq, Register: 1, Data: []byte{syn}})
	case unix.IPPROTO_SCTP:
		const offset, init = 12, 1 // the type of the first chunk, RFC 9260
		match(expr.PayloadBaseTransportHeader, offset, []byte{init})
	}
	return append(out,
		&expr.Limit{Type: expr.LimitTypePkts, Rate: perSecond, Unit: expr.LimitTimeSecond, Burst: perSecond},
		&expr.Immediate{Register: 1, Data: []byte{1}},
		&expr.Meta{Key: expr.MetaKeyNFTRACE, SourceRegister: true, Register: 1})
}
