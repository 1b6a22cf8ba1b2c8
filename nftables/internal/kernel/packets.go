//go:build linux

package kernel

import (
	"github.com/google/nftables/expr"
	"golang.org/x/sys/unix"

	"github.com/go-proxier/proxier/nftables/internal/layout"
)

// packetChains returns the chains of the table that counts the packets of translated connections by
// their original destinations. Each packet passes one of its two hooks, in both directions:
// postrouting if it leaves the node or goes to the node itself, and otherwise input.
func (w Rules) packetChains() []chainSpec {
	remote := rule{load(expr.MetaKeyIIFNAME, firstReg), differs(firstReg, interfaceName(layout.LoopbackInterface))}
	translated := rule(ctDNAT()).with(jump(layout.ChainPackets))
	var count []rule
	for _, p := range serviceProtocols {
		count = append(count, w.countPacket(p))
	}
	return []chainSpec{
		{layout.ChainPackets, nil, count},
		{layout.ChainPacketsIn, &BaseChain{"filter", unix.NF_INET_LOCAL_IN, priorityFilter}, []rule{remote.with(translated...)}},
		{layout.ChainPacketsOut, &BaseChain{"filter", unix.NF_INET_POST_ROUTING, priorityFilter}, []rule{translated}},
	}
}

// countPacket adds a packet of a connection to the counter of the connection's original destination.
// The protocol is the connection's, not the packet's, which may be an ICMP error. There is a rule for
// each, because the nft tool loads a rule that reads a connection's port only if it names the protocol.
func (w Rules) countPacket(protocol byte) rule {
	match := rule{of(&expr.Ct{Key: expr.CtKeyPROTOCOL, Register: firstReg}), equal(firstReg, []byte{protocol})}
	return match.with(
		w.originalAddr(firstReg),
		of(&expr.Ct{Key: expr.CtKeyPROTOCOL, Register: firstReg + w.words()}),
		originalPort(firstReg+w.words()+1),
		of(&expr.Dynset{
			SetName: layout.Packets.Name(), SrcRegKey: firstReg, Operation: unix.NFT_DYNSET_OP_UPDATE,
			Exprs: []expr.Any{&expr.Counter{}},
		}),
	)
}
