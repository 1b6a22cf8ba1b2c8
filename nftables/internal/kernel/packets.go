//go:build linux

package kernel

import (
	"github.com/google/nftables/expr"
	"golang.org/x/sys/unix"

	"github.com/go-proxier/proxier/nftables/internal/layout"
	"github.com/go-proxier/proxier/tracker"
)

// PacketCounters creates a table that counts the packets of translated connections by their
// original destinations. Each packet passes one of its two hooks, in both directions: postrouting if
// it leaves the node or goes to the node itself, and otherwise input.
func (w *Writer) PacketCounters(f tracker.Family) {
	w.newTable(f, 0)
	w.newSet(f, layout.Packets, layout.MaxPackets)
	for _, c := range (Rules{Family: f}).packetChains() {
		w.chain(f, c.name, c.base, c.rules)
	}
}

// packetChains returns the chains of the table that counts packets.
func (w Rules) packetChains() []chainSpec {
	remote := rule{load(expr.MetaKeyIIFNAME, firstReg), differs(firstReg, interfaceName(layout.LoopbackInterface))}
	return []chainSpec{
		{layout.ChainPacketsIn, &BaseChain{"filter", unix.NF_INET_LOCAL_IN, priorityFilter}, []rule{remote.with(w.countPacket()...)}},
		{layout.ChainPacketsOut, &BaseChain{"filter", unix.NF_INET_POST_ROUTING, priorityFilter}, []rule{w.countPacket()}},
	}
}

// countPacket adds a packet of a translated connection to the counter of its original destination.
// The protocol is the connection's, not the packet's, which may be an ICMP error.
func (w Rules) countPacket() rule {
	return rule(ctDNAT()).with(
		w.originalAddr(firstReg),
		of(&expr.Ct{Key: expr.CtKeyPROTOCOL, Register: firstReg + w.words()}),
		originalPort(firstReg+w.words()+1),
		of(&expr.Dynset{
			SetName: layout.Packets.Name(), SrcRegKey: firstReg, Operation: unix.NFT_DYNSET_OP_UPDATE,
			Exprs: []expr.Any{&expr.Counter{}},
		}),
	)
}

// HasPacketCounters reports whether a table is as PacketCounters makes it.
func (c *Conn) HasPacketCounters(table string, f tracker.Family) (bool, error) {
	head, err := c.Table(table, f)
	if err != nil || !head.Exists || head.Flags != 0 {
		return false, err
	}
	sets, err := c.Sets(table, f)
	if err != nil || len(sets) != 1 || !sets[layout.Packets.Name()].Is(layout.Packets.Spec(f)) {
		return false, err
	}
	chains, err := c.Chains(table, f)
	if err != nil {
		return false, err
	}
	rules, err := c.Rules(table, f)
	if err != nil {
		return false, err
	}
	counts := map[string]int{}
	for _, r := range rules {
		counts[r.Chain]++
	}
	want := (Rules{Family: f}).packetChains()
	for _, spec := range want {
		if chain, ok := chains[spec.name]; !ok || !chain.Is(spec.base) || counts[spec.name] != len(spec.rules) {
			return false, nil
		}
	}
	return len(chains) == len(want), nil
}
