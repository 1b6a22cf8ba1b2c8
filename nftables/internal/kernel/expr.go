//go:build linux

package kernel

import (
	"encoding/binary"
	"net"
	"slices"

	"github.com/google/nftables/expr"
	"golang.org/x/sys/unix"

	"github.com/go-proxier/proxier/nftables/internal/layout"
	"github.com/go-proxier/proxier/tracker"
)

// firstReg is the first register of a look-up's key (NFT_REG32_00). Registers are numbered as
// 32-bit words. The kernel reports the number of a 128-bit register that begins at the same
// word.
const firstReg = unix.NFT_REG32_00

// Registers after the longest key: dynsetDataReg holds the data of a new element of
// sticky-clients, hashReg the first word to hash, countReg the key of a counter, and shiftReg the
// ports of a shift.
const (
	dynsetDataReg = firstReg + 8
	hashReg       = firstReg + 8
	countReg      = firstReg + 8
	shiftReg      = firstReg + 8
)

// dynsetDelete is NFT_DYNSET_OP_DELETE of linux/netfilter/nf_tables.h, which
// golang.org/x/sys/unix lacks.
const dynsetDelete = 2

// rule is the expressions of a rule. Rules use only sequences of expressions that the nft tool
// generates for some statement. The tool aborts on others: nft 1.0.6 does on a register that is
// passed from one look-up to the next.
type rule []part

// part is one expression: its attributes (NFTA_EXPR_NAME and _DATA).
type part func(scope) ([]byte, error)

// scope is what an expression's encoding depends on.
type scope struct {
	family byte
	// protocols creates an anonymous set of the protocols of Services and returns its ID.
	protocols func() uint32
}

func (r rule) with(parts ...part) rule { return append(r[:len(r):len(r)], parts...) }

func of(e expr.Any) part {
	return func(s scope) ([]byte, error) { return expr.Marshal(s.family, e) }
}

func (w Rules) addrLen() uint32 { return uint32(w.Family.Bits() / 8) }

// words is the number of registers an address takes.
func (w Rules) words() uint32 { return w.addrLen() / 4 }

// saddr and daddr load an address of the packet (RFC 791, RFC 8200).
func (w Rules) saddr(reg uint32) part { return w.address(reg, 12, 8) }
func (w Rules) daddr(reg uint32) part { return w.address(reg, 16, 24) }

func (w Rules) address(reg, offset4, offset6 uint32) part {
	offset := offset4
	if w.Family == tracker.IPv6 {
		offset = offset6
	}
	return of(&expr.Payload{DestRegister: reg, Base: expr.PayloadBaseNetworkHeader, Offset: offset, Len: w.addrLen()})
}

// sport and dport load the ports, which TCP, UDP and SCTP have at the same place.
func sport(reg uint32) part { return port(reg, 0) }
func dport(reg uint32) part { return port(reg, 2) }

func port(reg, offset uint32) part {
	return of(&expr.Payload{DestRegister: reg, Base: expr.PayloadBaseTransportHeader, Offset: offset, Len: 2})
}

// proto loads the transport protocol.
func proto(reg uint32) part { return of(&expr.Meta{Key: expr.MetaKeyL4PROTO, Register: reg}) }

// serviceKey loads the key of the service maps: address, protocol and port. nodePortKey loads
// the key of the NodePort maps: protocol and port.
func (w Rules) serviceKey(reg uint32) []part {
	return append([]part{w.daddr(reg)}, nodePortKey(reg+w.words())...)
}
func nodePortKey(reg uint32) []part { return []part{proto(reg), dport(reg + 1)} }

func load(key expr.MetaKey, reg uint32) part { return of(&expr.Meta{Key: key, Register: reg}) }

func store(key expr.MetaKey, reg uint32) part {
	return of(&expr.Meta{Key: key, SourceRegister: true, Register: reg})
}

// word returns v in the kernel's byte order.
func word(v uint32) []byte { return binary.NativeEndian.AppendUint32(nil, v) }

// masked sets the register to (itself AND mask) XOR xor.
func masked(reg, mask, xor uint32) part {
	return of(&expr.Bitwise{SourceRegister: reg, DestRegister: reg, Len: 4, Mask: word(mask), Xor: word(xor)})
}

func equal(reg uint32, data []byte) part {
	return of(&expr.Cmp{Op: expr.CmpOpEq, Register: reg, Data: data})
}

func differs(reg uint32, data []byte) part {
	return of(&expr.Cmp{Op: expr.CmpOpNeq, Register: reg, Data: data})
}

// in matches if s has the key that begins in the first register. found replaces the key by its
// value in s.
func in(s layout.Set) part { return of(&expr.Lookup{SourceRegister: firstReg, SetName: s.Name()}) }

func found(s layout.Set) part {
	return of(&expr.Lookup{SourceRegister: firstReg, SetName: s.Name(), IsDestRegSet: true, DestRegister: firstReg})
}

// dispatch goes to the chain of the first register in the verdict map s.
func dispatch(s layout.Set) part {
	return of(&expr.Lookup{SourceRegister: firstReg, SetName: s.Name(), IsDestRegSet: true, DestRegister: unix.NFT_REG_VERDICT})
}

func gotoChain(chain string) part { return of(&expr.Verdict{Kind: expr.VerdictGoto, Chain: chain}) }
func jump(chain string) part      { return of(&expr.Verdict{Kind: expr.VerdictJump, Chain: chain}) }

func drop() part        { return of(&expr.Verdict{Kind: expr.VerdictDrop}) }
func returnChain() part { return of(&expr.Verdict{Kind: expr.VerdictReturn}) }

// reject answers with ICMP port unreachable (RFC 792, RFC 4443).
func (w Rules) reject() part {
	code := uint8(3)
	if w.Family == tracker.IPv6 {
		code = 4
	}
	return of(&expr.Reject{Type: unix.NFT_REJECT_ICMP_UNREACH, Code: code})
}

func masquerade() part { return of(&expr.Masq{FullyRandom: true}) }

// ofService matches the protocols of Services. The packet's is one of them wherever a rule uses ofService:
// the nft tool loads a rule that translates a port only if it names the protocol.
func ofService() []part {
	return []part{proto(firstReg), func(s scope) ([]byte, error) {
		return expr.Marshal(s.family, &expr.Lookup{SourceRegister: firstReg, SetName: anonymousSet, SetID: s.protocols()})
	}}
}

// dnat sends the connection to the address and port that the last look-up found.
func (w Rules) dnat() part {
	nat := w.toAddr()
	nat.RegProtoMin = firstReg + w.words()
	nat.RegProtoMax = nat.RegProtoMin
	return of(nat)
}

// dnatShifted sends the connection to the address that the last look-up found, and shifts its port
// by the range that pool has in the maps of shifts: see [layout.ShiftedBy].
func (w Rules) dnatShifted(pool uint32) []part {
	var out []part
	for i, s := range []layout.Set{layout.ShiftFrom, layout.ShiftTo} {
		reg := shiftReg + uint32(i)
		out = append(out, load(expr.MetaKeyPRIORITY, reg),
			of(&expr.Bitwise{SourceRegister: reg, DestRegister: reg, Len: 4, Mask: word(pool), Xor: word(0)}),
			of(&expr.Lookup{SourceRegister: reg, SetName: s.Name(), IsDestRegSet: true, DestRegister: reg}))
	}
	nat := w.toAddr()
	nat.RegProtoMin, nat.RegProtoMax = shiftReg, shiftReg+1
	nat.Specified = true // so that there are flags
	return append(out, func(s scope) ([]byte, error) {
		out, err := expr.Marshal(s.family, nat)
		if err != nil {
			return nil, err
		}
		out[len(out)-1] |= natOffset // the flags are the last attribute, in network byte order
		return out, nil
	})
}

// natOffset is NF_NAT_RANGE_PROTO_OFFSET of linux/netfilter/nf_nat.h, which
// github.com/google/nftables lacks.
const natOffset = 1 << 5

// dnatAddr sends the connection to the address that the last look-up found, and keeps the port.
func (w Rules) dnatAddr() part { return of(w.toAddr()) }

func (w Rules) toAddr() *expr.NAT {
	family := uint32(unix.NFPROTO_IPV4)
	if w.Family == tracker.IPv6 {
		family = unix.NFPROTO_IPV6
	}
	return &expr.NAT{Type: expr.NATTypeDestNAT, Family: family, RegAddrMin: firstReg, RegAddrMax: firstReg}
}

// fib matches if the packet's source or destination is an address of this node.
func fib(source bool) []part {
	return []part{
		of(&expr.Fib{Register: firstReg, ResultADDRTYPE: true, FlagSADDR: source, FlagDADDR: !source}),
		equal(firstReg, word(unix.RTN_LOCAL)),
	}
}

// interfaceIs matches packets by their incoming or outgoing interface.
func interfaceIs(key expr.MetaKey, name string) []part {
	return []part{load(key, firstReg), equal(firstReg, interfaceName(name))}
}

// toItself matches packets from the node to one of its own addresses, in the output hook
// alone. The interface does not suffice: packets that another route sends to the loopback
// interface never reach the input hook.
func toItself() []part {
	return append(interfaceIs(expr.MetaKeyOIFNAME, layout.LoopbackInterface), fib(false)...)
}

// interfaceName returns a whole name as rules compare it.
func interfaceName(name string) []byte {
	o := layout.InterfaceName(name)
	return slices.Clone(o.Bytes())
}

// under compares the bits of mask in the number that load loads.
func under(mask uint32, load, compare part) []part {
	return []part{load, masked(firstReg, mask, 0), compare}
}

func ctHas(key expr.CtKey, bit uint32) []part {
	return under(bit, of(&expr.Ct{Key: key, Register: firstReg}), differs(firstReg, word(0)))
}

func ctNew() []part { return ctHas(expr.CtKeySTATE, expr.CtStateBitNEW) }

// ctDNAT matches connections whose destination was translated
// (linux/netfilter/nf_conntrack_common.h, IPS_DST_NAT). ctNotDNAT matches the others.
func ctDNAT() []part { return ctHas(expr.CtKeySTATUS, ctStatusDNAT) }

func ctNotDNAT() []part {
	return under(ctStatusDNAT, of(&expr.Ct{Key: expr.CtKeySTATUS, Register: firstReg}), equal(firstReg, word(0)))
}

const ctStatusDNAT = 1 << 5

// hasDispatch matches packets that carry a dispatch key.
func hasDispatch() []part {
	return under(layout.DispatchMark, load(expr.MetaKeyPRIORITY, firstReg), equal(firstReg, word(layout.DispatchMark)))
}

// storeDispatch stores the result of the last look-up as the packet's dispatch key.
func storeDispatch() part { return store(expr.MetaKeyPRIORITY, firstReg) }

// loadDispatch loads the part of the dispatch key under mask.
func loadDispatch(mask uint32) []part {
	return []part{load(expr.MetaKeyPRIORITY, firstReg), masked(firstReg, mask, 0)}
}

// random loads a random number below n into the register after a pool's number.
func random(n uint32) part {
	return of(&expr.Numgen{Register: firstReg + 1, Modulus: n, Type: unix.NFT_NG_RANDOM})
}

// markForMasquerade sets the bit that layout.ChainMasquerading looks for.
func (w Rules) markForMasquerade() []part {
	return []part{
		load(expr.MetaKeyMARK, firstReg),
		masked(firstReg, ^w.Mark, w.Mark),
		store(expr.MetaKeyMARK, firstReg),
	}
}

// prefixed clears all but the first bits of the address in the first register.
func (w Rules) prefixed(bits int) []part {
	if bits == w.Family.Bits() {
		return nil
	}
	return []part{of(&expr.Bitwise{
		SourceRegister: firstReg, DestRegister: firstReg, Len: w.addrLen(),
		Mask: net.CIDRMask(bits, w.Family.Bits()), Xor: make([]byte, w.addrLen()),
	})}
}
