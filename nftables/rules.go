//go:build linux

package nftables

import (
	"encoding/binary"
	"time"

	"github.com/google/nftables/expr"
	"golang.org/x/sys/unix"

	"github.com/go-proxier/proxier/internal/nfnl"
	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/tracker"
)

// firstReg is the register a look-up's key begins in (NFT_REG32_00). Registers
// are numbered as 32-bit words throughout; the kernel itself shows them as
// 128-bit ones where they coincide.
const firstReg = unix.NFT_REG32_00

// dynsetDataReg holds what is put into sticky-clients: behind the longest key.
const dynsetDataReg = firstReg + 8

// hashReg is where what is hashed begins.
const hashReg = firstReg + 8

// Numbers that golang.org/x/sys/unix lacks (linux/netfilter/nf_tables.h):
// NFTA_BITWISE_OP, NFTA_BITWISE_DATA, NFT_BITWISE_LSHIFT, NFT_DYNSET_OP_DELETE.
const (
	bitwiseOp        = 6
	bitwiseData      = 7
	bitwiseLeftShift = 1
	dynsetDelete     = 2
)

// rule is one rule's expressions. Rules use only sequences of expressions that
// the nft tool would itself make of some statement, because it aborts on others
// (seen with nft 1.0.6: a register passed from one look-up to the next).
type rule []part

// part is one expression: its attributes (NFTA_EXPR_NAME and _DATA).
type part func(family byte) ([]byte, error)

func (r rule) with(parts ...part) rule { return append(r[:len(r):len(r)], parts...) }

func of(e expr.Any) part {
	return func(family byte) ([]byte, error) { return expr.Marshal(family, e) }
}

// rules renders the rules of one family's table.
type rules struct {
	family tracker.Family
	// mark is the bit of the packet's mark that asks for masquerading.
	mark uint32
	// seed is that of the hashes, not 0: the kernel takes that for any.
	seed uint32
}

func (w rules) addrLen() uint32 { return uint32(w.family.Bits() / 8) }

// words is the number of registers an address takes.
func (w rules) words() uint32 { return w.addrLen() / 4 }

// saddr and daddr load an address of the packet (RFC 791, RFC 8200).
func (w rules) saddr(reg uint32) part {
	offset := uint32(12)
	if w.family == tracker.IPv6 {
		offset = 8
	}
	return of(&expr.Payload{DestRegister: reg, Base: expr.PayloadBaseNetworkHeader, Offset: offset, Len: w.addrLen()})
}

func (w rules) daddr(reg uint32) part {
	offset := uint32(16)
	if w.family == tracker.IPv6 {
		offset = 24
	}
	return of(&expr.Payload{DestRegister: reg, Base: expr.PayloadBaseNetworkHeader, Offset: offset, Len: w.addrLen()})
}

// proto and dport load the transport protocol and the destination port, which
// TCP, UDP and SCTP have at the same place.
func proto(reg uint32) part { return of(&expr.Meta{Key: expr.MetaKeyL4PROTO, Register: reg}) }

func dport(reg uint32) part {
	return of(&expr.Payload{DestRegister: reg, Base: expr.PayloadBaseTransportHeader, Offset: 2, Len: 2})
}

// service loads the key of the service maps: address, protocol and port.
func (w rules) service(reg uint32) []part {
	return []part{w.daddr(reg), proto(reg + w.words()), dport(reg + w.words() + 1)}
}

// sport loads the source port.
func sport(reg uint32) part {
	return of(&expr.Payload{DestRegister: reg, Base: expr.PayloadBaseTransportHeader, Offset: 0, Len: 2})
}

func load(key expr.MetaKey, reg uint32) part { return of(&expr.Meta{Key: key, Register: reg}) }

func store(key expr.MetaKey, reg uint32) part {
	return of(&expr.Meta{Key: key, SourceRegister: true, Register: reg})
}

// word is v as the kernel keeps numbers of its own.
func word(v uint32) []byte { return binary.NativeEndian.AppendUint32(nil, v) }

// masked sets the register to (itself AND mask) XOR xor.
func masked(reg, mask, xor uint32) part {
	return of(&expr.Bitwise{SourceRegister: reg, DestRegister: reg, Len: 4, Mask: word(mask), Xor: word(xor)})
}

// shifted shifts the register left. The library has no such expression.
func shifted(reg, bits uint32) part {
	return func(byte) ([]byte, error) {
		var value, data []byte
		value = nfnl.AppendBytes(value, unix.NFTA_DATA_VALUE, word(bits))
		data = nfnl.AppendUint32(data, unix.NFTA_BITWISE_SREG, reg)
		data = nfnl.AppendUint32(data, unix.NFTA_BITWISE_DREG, reg)
		data = nfnl.AppendUint32(data, unix.NFTA_BITWISE_LEN, 4)
		data = nfnl.AppendUint32(data, bitwiseOp, bitwiseLeftShift)
		data = nfnl.AppendBytes(data, bitwiseData|unix.NLA_F_NESTED, value)
		out := nfnl.AppendString(nil, unix.NFTA_EXPR_NAME, "bitwise")
		return nfnl.AppendBytes(out, unix.NFTA_EXPR_DATA|unix.NLA_F_NESTED, data), nil
	}
}

func equal(reg uint32, data []byte) part {
	return of(&expr.Cmp{Op: expr.CmpOpEq, Register: reg, Data: data})
}

func differs(reg uint32, data []byte) part {
	return of(&expr.Cmp{Op: expr.CmpOpNeq, Register: reg, Data: data})
}

// in matches if the key that begins in the first register is in s, and found
// replaces it by what s maps it to.
func in(s set) part { return of(&expr.Lookup{SourceRegister: firstReg, SetName: s.name()}) }

func found(s set) part {
	return of(&expr.Lookup{SourceRegister: firstReg, SetName: s.name(), IsDestRegSet: true, DestRegister: firstReg})
}

// dispatch goes to the chain that s, a verdict map, maps the first register to.
func dispatch(s set) part {
	return of(&expr.Lookup{SourceRegister: firstReg, SetName: s.name(), IsDestRegSet: true, DestRegister: unix.NFT_REG_VERDICT})
}

func gotoChain(chain string) part { return of(&expr.Verdict{Kind: expr.VerdictGoto, Chain: chain}) }
func jump(chain string) part      { return of(&expr.Verdict{Kind: expr.VerdictJump, Chain: chain}) }

func drop() part        { return of(&expr.Verdict{Kind: expr.VerdictDrop}) }
func returnChain() part { return of(&expr.Verdict{Kind: expr.VerdictReturn}) }

// reject answers with ICMP port unreachable (RFC 792, RFC 4443).
func (w rules) reject() part {
	code := uint8(3)
	if w.family == tracker.IPv6 {
		code = 4
	}
	return of(&expr.Reject{Type: unix.NFT_REJECT_ICMP_UNREACH, Code: code})
}

func masquerade() part { return of(&expr.Masq{FullyRandom: true}) }

// dnat sends the connection to the address and port that were looked up.
func (w rules) dnat() part {
	family := uint32(unix.NFPROTO_IPV4)
	if w.family == tracker.IPv6 {
		family = unix.NFPROTO_IPV6
	}
	port := firstReg + w.words()
	return of(&expr.NAT{
		Type: expr.NATTypeDestNAT, Family: family,
		RegAddrMin: firstReg, RegAddrMax: firstReg,
		RegProtoMin: port, RegProtoMax: port,
	})
}

// fib matches if the packet's source or destination is an address of this node.
func fib(source bool) []part {
	return []part{
		of(&expr.Fib{Register: firstReg, ResultADDRTYPE: true, FlagSADDR: source, FlagDADDR: !source}),
		equal(firstReg, word(unix.RTN_LOCAL)),
	}
}

// loopbackInterface is the interface by which the node's packets to its own
// addresses go out of the output hook and come in again.
const loopbackInterface = "lo"

// interfaceIs matches packets by the interface that they come in or go out by.
func interfaceIs(key expr.MetaKey, name string) []part {
	return []part{load(key, firstReg), equal(firstReg, interfaceName(name))}
}

// toItself matches, in the output hook alone, what the node sends to one of its own
// addresses. The interface alone does not show it: packets that another route sends
// to the loopback interface never come to the input hook.
func toItself() []part {
	return append(interfaceIs(expr.MetaKeyOIFNAME, loopbackInterface), fib(false)...)
}

// interfaceName is a whole name as rules compare it.
func interfaceName(name string) []byte {
	out := make([]byte, unix.IFNAMSIZ)
	copy(out, name)
	return out
}

func ctHas(key expr.CtKey, bit uint32) []part {
	return []part{
		of(&expr.Ct{Key: key, Register: firstReg}),
		masked(firstReg, bit, 0),
		differs(firstReg, word(0)),
	}
}

func ctNew() []part { return ctHas(expr.CtKeySTATE, expr.CtStateBitNEW) }

// ctDNAT matches connections whose destination was changed
// (linux/netfilter/nf_conntrack_common.h, IPS_DST_NAT), and ctNotDNAT the others.
func ctDNAT() []part { return ctHas(expr.CtKeySTATUS, ctStatusDNAT) }

func ctNotDNAT() []part {
	return []part{
		of(&expr.Ct{Key: expr.CtKeySTATUS, Register: firstReg}),
		masked(firstReg, ctStatusDNAT, 0),
		equal(firstReg, word(0)),
	}
}

const ctStatusDNAT = 1 << 5

// hasDispatch matches packets that carry a dispatch key.
func hasDispatch() []part {
	return []part{
		load(expr.MetaKeyPRIORITY, firstReg),
		masked(firstReg, dispatchMark, 0),
		equal(firstReg, word(dispatchMark)),
	}
}

// storeDispatch stores what was looked up last as the packet's dispatch key.
func storeDispatch() part { return store(expr.MetaKeyPRIORITY, firstReg) }

// loadDispatch loads the part of the dispatch key under mask.
func loadDispatch(mask uint32) []part {
	return []part{load(expr.MetaKeyPRIORITY, firstReg), masked(firstReg, mask, 0)}
}

// random loads a random number below n behind a pool's number.
func random(n uint32) part {
	return of(&expr.Numgen{Register: firstReg + 1, Modulus: n, Type: unix.NFT_NG_RANDOM})
}

// markForMasquerade sets the bit that chainMasquerading looks for.
func (w rules) markForMasquerade() []part {
	return []part{
		load(expr.MetaKeyMARK, firstReg),
		masked(firstReg, ^w.mark, w.mark),
		store(expr.MetaKeyMARK, firstReg),
	}
}

// dispatchBy takes a dispatch key from a map and goes to the chain of its handler.
func dispatchBy(key []part, dispatchKeys, handlers set) rule {
	r := rule(key).with(found(dispatchKeys), storeDispatch())
	return r.with(loadDispatch(handlerMask)...).with(dispatch(handlers))
}

// services finds the service that a new connection is for.
func (w rules) services() []rule {
	nodePort := rule{w.daddr(firstReg), in(setNodePortIPs)}
	return []rule{
		dispatchBy(w.service(firstReg), setServiceIPs, setHandlers),
		nodePort.with(fib(false)...).with(gotoChain(chainNodePorts)),
	}
}

func (w rules) nodePorts() []rule {
	return []rule{dispatchBy([]part{proto(firstReg), dport(firstReg + 1)}, setNodePorts, setHandlers)}
}

// near is where connections from this node's pods and from the node itself get
// their dispatch key under externalTrafficPolicy Local.
func (w rules) internal() []rule {
	return []rule{
		dispatchBy(w.service(firstReg), setInternalIPs, setInternalHandlers),
		dispatchBy([]part{proto(firstReg), dport(firstReg + 1)}, setInternalNodePorts, setInternalHandlers),
	}
}

// filterBase is what happens to a new connection behind the NAT chains: its
// priority is put back if it carried a dispatch key, and cluster IPs that were not
// translated are refused.
func (w rules) filterBase() []rule {
	restore := rule(ctNew()).with(ctDNAT()...).with(hasDispatch()...).with(resetPriority()...)
	return []rule{restore, rule(ctNew()).with(jump(chainClusterIPs))}
}

// resetPriority takes a dispatch key off the packet.
func resetPriority() []part {
	return []part{
		of(&expr.Immediate{Register: firstReg, Data: word(0)}),
		store(expr.MetaKeyPRIORITY, firstReg),
	}
}

// filterInput stops the connections of the node to itself that stop let pass in the
// output hook. Unlike the NAT chains, it sees every packet of them.
func (w rules) filterInput() []rule {
	own := rule(interfaceIs(expr.MetaKeyIIFNAME, loopbackInterface)).with(ctNew()...).with(ctNotDNAT()...)
	return []rule{own.with(jump(chainOwnServices))}
}

// ownServices and ownNodePorts look up again which Service a connection of the node
// to itself is for. The map own-handlers has only the handlers that reject or drop.
func (w rules) ownServices() []rule {
	nodePort := rule{w.daddr(firstReg), in(setNodePortIPs)}
	return []rule{
		dispatchBy(w.service(firstReg), setServiceIPs, setOwnHandlers),
		nodePort.with(fib(false)...).with(jump(chainOwnNodePorts)),
		rule(hasDispatch()).with(resetPriority()...),
	}
}

func (w rules) ownNodePorts() []rule {
	return []rule{dispatchBy([]part{proto(firstReg), dport(firstReg + 1)}, setNodePorts, setOwnHandlers)}
}

// stop renders a chain that ends a connection by the verdict. What the node sends
// to itself goes on to filter-input, which ends it: the kernel returns EPERM to a
// socket whose packet is stopped in the output hook.
func stop(verdict part) []rule {
	own := rule(toItself()).with(resetPriority()...)
	return []rule{own.with(returnChain()), {verdict}}
}

func (w rules) clusterIPsCheck() []rule {
	return []rule{
		rule(toItself()).with(returnChain()),
		{w.daddr(firstReg), in(setClusterIPs), w.reject()},
		{w.daddr(firstReg), in(setServiceCIDRs), drop()},
	}
}

func (w rules) masquerading() []rule {
	marked := rule{
		load(expr.MetaKeyMARK, firstReg), masked(firstReg, w.mark, 0), equal(firstReg, word(w.mark)),
		load(expr.MetaKeyMARK, firstReg), masked(firstReg, ^w.mark, 0), store(expr.MetaKeyMARK, firstReg),
		masquerade(),
	}
	hairpin := rule(ctDNAT()).with(w.saddr(firstReg), w.daddr(firstReg+w.words()), in(setHairpin), masquerade())
	return []rule{marked, hairpin}
}

// allowedSource lets sources pass the firewall that are within a prefix of the
// given length.
func (w rules) allowedSource(bits int) rule {
	r := rule{w.saddr(firstReg)}.with(w.prefixed(bits)...)
	return r.with(w.service(firstReg+w.words())...).with(in(allowed(bits)), returnChain())
}

// hashed loads a number below n, which follows from the connection's source, behind
// a pool's number: the Jenkins hash of the address and, where that is asked for,
// the port, scaled down (linux/netfilter/nf_tables.h, NFT_HASH_JENKINS).
func (w rules) hashed(h tracker.Hash, n uint32) []part {
	parts, length := []part{w.saddr(hashReg)}, w.addrLen()
	if h == tracker.HashSourcePort {
		parts, length = append(parts, sport(hashReg+w.words())), length+4
	}
	return append(parts, of(&expr.Hash{
		SourceRegister: hashReg, DestRegister: firstReg + 1, Length: length,
		Modulus: n, Seed: w.seed, Type: expr.HashTypeJenkins,
	}))
}

// poolChain draws a bucket, or finds it by a hash, and sends the connection to the
// endpoint in it.
func (w rules) poolChain(c handler) []rule {
	send := func(bucket ...part) rule {
		return rule(loadDispatch(poolMask)).with(bucket...).with(found(setEndpoints), w.dnat())
	}
	draw := func(n int) rule { return send(random(uint32(n))) }
	buckets := c.buckets
	switch {
	case c.hash != tracker.HashNone:
		return []rule{send(w.hashed(c.hash, uint32(buckets))...)}
	case buckets <= exactBuckets:
		return []rule{draw(buckets)}
	}
	// Fewer than one draw in five finds an empty bucket. Should four in a row, the
	// last is among the buckets that are never empty.
	return []rule{draw(buckets), draw(buckets), draw(buckets), draw(buckets), draw(bucketsBelow(buckets))}
}

// stickyChain sends the connection to the endpoint that its client was sent to
// last, if that still is one, and otherwise draws one, or finds it by a hash, and
// remembers it.
func (w rules) stickyChain(c handler, timeout time.Duration) []rule {
	buckets := c.buckets
	client := append(loadDispatch(stickyMask), w.saddr(firstReg+1))
	remember := func(op uint32) rule {
		return rule(client).with(load(expr.MetaKeyPRIORITY, dynsetDataReg), of(&expr.Dynset{
			SetName: setStickyClients.name(), SrcRegKey: firstReg, SrcRegData: dynsetDataReg,
			Operation: op, Timeout: timeout,
		}))
	}
	recall := rule(client).with(found(setStickyClients), storeDispatch())
	send := rule{load(expr.MetaKeyPRIORITY, firstReg), found(setStickyEndpoints), w.dnat()}
	known := []part{load(expr.MetaKeyPRIORITY, firstReg), masked(firstReg, ^uint32(stickyMask), 0), differs(firstReg, word(0))}
	draw := func(n int) rule {
		bucket := []part{random(uint32(n))}
		if c.hash != tracker.HashNone {
			bucket = w.hashed(c.hash, uint32(n))
		}
		return rule(loadDispatch(stickyMask)).with(bucket...).with(found(setStickyBuckets), storeDispatch())
	}

	rules := []rule{
		{load(expr.MetaKeyPRIORITY, firstReg), shifted(firstReg, stickyShift), storeDispatch()},
		recall,
		rule(known).with(remember(unix.NFT_DYNSET_OP_UPDATE)...).with(send...),
		// Not sent on: nothing is remembered, or an endpoint that is gone.
		remember(dynsetDelete),
		rule(loadDispatch(stickyMask)).with(storeDispatch()),
	}
	// A draw whose bucket was empty leaves the dispatch key as it was. One that hit turns it
	// into an endpoint's, whose pool part the next draw would start from again: so
	// the surest comes first and the most even last.
	if buckets > exactBuckets && c.hash == tracker.HashNone {
		rules = append(rules, draw(bucketsBelow(buckets)), draw(buckets), draw(buckets), draw(buckets))
	}
	return append(rules,
		draw(buckets),
		remember(unix.NFT_DYNSET_OP_UPDATE),
		// Another connection of the client's may have been remembered first.
		recall,
		send,
	)
}

// isInternal is one rule's condition for each way in which a connection is from one
// of this node's pods.
func (w rules) isInternal(l ruleset.LocalTraffic) []rule {
	return w.localTraffic(l, equal)
}

// notInternal is the condition under which a connection is not from one of this
// node's pods: one rule, as all must hold.
func (w rules) notInternal(l ruleset.LocalTraffic) rule {
	var all rule
	for _, r := range w.localTraffic(l, differs) {
		all = all.with(r...)
	}
	return all
}

func (w rules) localTraffic(l ruleset.LocalTraffic, cmp func(uint32, []byte) part) []rule {
	switch {
	case l.Bridge != "":
		return []rule{{load(expr.MetaKeyIIFNAME, firstReg), cmp(firstReg, interfaceName(l.Bridge))}}
	case l.InterfacePrefix != "":
		return []rule{{load(expr.MetaKeyIIFNAME, firstReg), cmp(firstReg, []byte(l.InterfacePrefix))}}
	}
	var out []rule
	for _, c := range l.CIDRs {
		if tracker.FamilyOf(c.Addr()) != w.family {
			continue
		}
		r := rule{w.saddr(firstReg)}.with(w.prefixed(c.Bits())...)
		out = append(out, r.with(cmp(firstReg, c.Masked().Addr().AsSlice())))
	}
	return out
}

// prefixed clears what is behind the first bits of the address in the first
// register.
func (w rules) prefixed(bits int) []part {
	if bits == w.family.Bits() {
		return nil
	}
	mask := make([]byte, w.addrLen())
	for i := range bits {
		mask[i/8] |= 0x80 >> (i % 8)
	}
	return []part{of(&expr.Bitwise{
		SourceRegister: firstReg, DestRegister: firstReg, Len: w.addrLen(),
		Mask: mask, Xor: make([]byte, w.addrLen()),
	})}
}
