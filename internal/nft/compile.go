//go:build linux

package nft

import (
	"encoding/binary"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/google/nftables/expr"
	"golang.org/x/sys/unix"

	"github.com/go-proxier/proxier/internal/nfnl"
)

// firstReg is the first register of a look-up's key (NFT_REG32_00). Registers are numbered as 32-bit words.
const firstReg = unix.NFT_REG32_00

// Registers behind what a rule holds: hashReg is the first word to hash, as in the tool, and spareReg the key
// of a counter or the ports of a shift.
const (
	hashReg  = firstReg + 6
	spareReg = firstReg + 8
)

// compiler encodes a rule in the syntax of nft as the kernel's expressions (NFTA_EXPR_NAME and _DATA), as the tool
// does: the tool lists other expressions wrongly, or aborts.
type compiler struct {
	family byte // NFPROTO_*
	// v6 is set if the rule is about addresses of IPv6.
	v6 bool
	Words
	out [][]byte
	err error
	// protocols creates an anonymous set of the protocols of Services and returns its ID.
	protocols func() uint32
}

// Compile returns the expressions of a rule in the syntax of nft, in a table of a family (NFPROTO_*).
// protocols creates an anonymous set of the protocols of Services and returns its ID in the transaction.
func Compile(family byte, rule string, protocols func() uint32) ([][]byte, error) {
	v6 := family == unix.NFPROTO_IPV6 || strings.Contains(rule, "ip6 ")
	c := &compiler{family: family, v6: v6, Words: Words(rule), protocols: protocols}
	for c.Words != "" && c.err == nil {
		c.statement()
	}
	if c.err != nil {
		return nil, fmt.Errorf("cannot encode rule %q: %w", rule, c.err)
	}
	return c.out, nil
}

func (c *compiler) emit(list ...expr.Any) {
	for _, e := range list {
		data, err := expr.Marshal(c.family, e)
		c.fail(err)
		c.out = append(c.out, data)
	}
}

// need skips words that must come next.
func (c *compiler) need(words string) {
	if !c.Accept(words) {
		c.fail(fmt.Errorf("%q is missing before %q", words, c.Words))
	}
}

// set returns the name in a word like "@services".
func (c *compiler) set() string {
	name, ok := strings.CutPrefix(c.Next(), "@")
	if !ok {
		c.fail(fmt.Errorf("a set is missing before %q", c.Words))
	}
	return name
}

func (c *compiler) statement() {
	switch {
	case c.Accept("drop"):
		c.emit(&expr.Verdict{Kind: expr.VerdictDrop})
	case c.Accept("return"):
		c.emit(&expr.Verdict{Kind: expr.VerdictReturn})
	case c.Accept("jump"):
		c.emit(&expr.Verdict{Kind: expr.VerdictJump, Chain: c.Next()})
	case c.Accept("goto"):
		c.emit(&expr.Verdict{Kind: expr.VerdictGoto, Chain: c.Next()})
	case c.Accept("counter"):
		c.emit(&expr.Counter{})
	case c.Accept("reject with tcp reset"):
		c.emit(&expr.Reject{Type: unix.NFT_REJECT_TCP_RST})
	case c.Accept("reject"):
		code := uint8(3) // ICMP port unreachable (RFC 792, RFC 4443)
		if c.v6 {
			code = 4
		}
		c.emit(&expr.Reject{Type: unix.NFT_REJECT_ICMP_UNREACH, Code: code})
	case c.Accept("masquerade fully-random"):
		c.emit(&expr.Masq{FullyRandom: true})
	case c.Accept("flow add"):
		c.emit(&expr.FlowOffload{Name: c.set()})
	case c.Accept("update"):
		c.update(unix.NFT_DYNSET_OP_UPDATE)
	case c.Accept("delete"):
		c.update(dynsetDelete)
	case c.Accept("dnat"):
		c.dnat(nil)
	case c.Accept("meta priority set none"):
		c.emit(&expr.Immediate{Register: firstReg, Data: word(0)}, &expr.Meta{Key: expr.MetaKeyPRIORITY, SourceRegister: true, Register: firstReg})
	case c.Accept("meta priority set"):
		c.value(firstReg)
		c.emit(&expr.Meta{Key: expr.MetaKeyPRIORITY, SourceRegister: true, Register: firstReg})
	case c.Accept("meta nftrace set 1"):
		c.emit(&expr.Immediate{Register: firstReg, Data: []byte{1}}, &expr.Meta{Key: expr.MetaKeyNFTRACE, SourceRegister: true, Register: firstReg})
	case c.Accept("limit rate 100/second burst 100 packets"):
		c.emit(&expr.Limit{Type: expr.LimitTypePkts, Rate: 100, Unit: expr.LimitTimeSecond, Burst: 100})
	case c.Accept("meta mark set"):
		c.value(firstReg)
		c.emit(&expr.Meta{Key: expr.MetaKeyMARK, SourceRegister: true, Register: firstReg})
	case c.Accept("meta l4proto { tcp, udp, sctp }"):
		c.emit(&expr.Meta{Key: expr.MetaKeyL4PROTO, Register: firstReg},
			&expr.Lookup{SourceRegister: firstReg, SetName: anonymousSet, SetID: c.protocols()})
	default:
		c.match()
	}
}

// dynsetDelete is NFT_DYNSET_OP_DELETE of linux/netfilter/nf_tables.h, which
// golang.org/x/sys/unix lacks.
const dynsetDelete = 2

// update encodes the change of a set by packets: { key counter }, or { key timeout time : data }. Before dnat, it
// takes effect after the look-up of dnat, so a connection that finds no endpoint is not counted.
func (c *compiler) update(op uint32) {
	e := &expr.Dynset{SetName: c.set(), Operation: op, SrcRegKey: firstReg}
	counts := len(c.out)
	c.need("{")
	if strings.Contains(string(c.Words), "} dnat ") {
		e.SrcRegKey = spareReg
	}
	words := c.concatenation(e.SrcRegKey)
	if c.Accept("timeout") {
		var err error
		e.Timeout, err = time.ParseDuration(c.Next())
		c.fail(err)
	}
	if c.Accept("counter") {
		e.Exprs = []expr.Any{&expr.Counter{}}
	}
	if c.Accept(":") {
		e.SrcRegData = firstReg + (words+3)&^3 // the next register of 128 bits
		c.concatenation(e.SrcRegData)
	}
	c.need("}")
	c.emit(e)
	if c.Accept("dnat") {
		count := slices.Clone(c.out[counts:])
		c.out = c.out[:counts]
		c.dnat(count)
	}
}

// dnat encodes the translation to an address and port, with expressions before it.
func (c *compiler) dnat(before [][]byte) {
	nat := &expr.NAT{Type: expr.NATTypeDestNAT, Family: uint32(c.family), RegAddrMin: firstReg, RegAddrMax: firstReg}
	c.Accept("ip")
	c.Accept("ip6")
	c.need("to")
	c.value(firstReg)
	c.out = append(c.out, before...)
	nat.RegProtoMin = firstReg + c.addrLen()/4
	nat.RegProtoMax = nat.RegProtoMin
	c.emit(nat)
}

// value loads a value into a register and those behind it.
func (c *compiler) value(reg uint32) {
	c.concatenation(reg)
	if c.Accept("map") {
		c.emit(&expr.Lookup{SourceRegister: reg, SetName: c.set(), IsDestRegSet: true, DestRegister: reg})
	}
}

// concatenation loads a key and returns the number of registers that it takes.
func (c *compiler) concatenation(reg uint32) uint32 {
	words := c.operand(reg)
	for c.Accept(".") {
		words += c.operand(reg + words)
	}
	return words
}

// operand loads one field of a key and returns the number of registers that it takes.
func (c *compiler) operand(reg uint32) uint32 {
	addr := c.addrLen() / 4
	switch {
	case c.Accept("ip saddr"), c.Accept("ip6 saddr"):
		c.emit(c.address(reg, 12, 8))
		if c.Accept("&") {
			mask, err := netip.ParseAddr(c.Next())
			c.fail(err)
			c.emit(c.maskedAddr(reg, mask.AsSlice()))
		}
		return addr
	case c.Accept("ip daddr"), c.Accept("ip6 daddr"):
		c.emit(c.address(reg, 16, 24))
		return addr
	case c.Accept("ct original ip daddr"):
		c.out = append(c.out, nfnl.OriginalCt(nfnl.CtDstIP, reg))
		return addr
	case c.Accept("ct original ip6 daddr"):
		c.out = append(c.out, nfnl.OriginalCt(nfnl.CtDstIP6, reg))
		return addr
	case c.Accept("ct original proto-dst"):
		c.out = append(c.out, nfnl.OriginalCt(nfnl.CtProtoDst, reg))
	case c.Accept("ct protocol"):
		c.emit(&expr.Ct{Key: expr.CtKeyPROTOCOL, Register: reg})
	case c.Accept("meta l4proto"):
		c.emit(&expr.Meta{Key: expr.MetaKeyL4PROTO, Register: reg})
	case c.Accept("th sport"):
		c.emit(port(reg, 0))
	case c.Accept("th dport"), c.Accept("tcp dport"):
		c.emit(port(reg, 2))
	case c.Begins("@th,"): // one byte of the header of TCP, UDP or SCTP, at an offset in bits
		offset, _ := strings.CutSuffix(strings.TrimPrefix(c.Next(), "@th,"), ",8")
		c.emit(&expr.Payload{DestRegister: reg, Base: expr.PayloadBaseTransportHeader, Offset: c.number(offset) / 8, Len: 1})
		if c.Accept("&") {
			c.emit(&expr.Bitwise{SourceRegister: reg, DestRegister: reg, Len: 1, Mask: []byte{byte(c.number(c.Next()))}, Xor: []byte{0}})
		}
	case c.Accept("meta priority"):
		c.emit(&expr.Meta{Key: expr.MetaKeyPRIORITY, Register: reg})
		if c.Accept("&") {
			c.emit(masked(reg, c.number(c.Next()), 0))
		}
	case c.Accept("meta mark"):
		c.emit(&expr.Meta{Key: expr.MetaKeyMARK, Register: reg})
		if c.Accept("&") {
			c.emit(masked(reg, c.number(c.Next()), 0))
		} else if c.Accept("|") {
			bits := c.number(c.Next())
			c.emit(masked(reg, ^bits, bits))
		}
	case c.Accept("numgen random mod"):
		c.emit(&expr.Numgen{Register: reg, Modulus: c.number(c.Next()), Type: unix.NFT_NG_RANDOM})
	case c.Accept("jhash"):
		// linux/netfilter/nf_tables.h, NFT_HASH_JENKINS
		h := &expr.Hash{SourceRegister: hashReg, DestRegister: reg, Length: c.addrLen(), Type: expr.HashTypeJenkins}
		c.operand(hashReg)
		if c.Accept(".") {
			h.Length += 4 * c.operand(hashReg+addr)
		}
		c.need("mod")
		h.Modulus = c.number(c.Next())
		c.need("seed")
		h.Seed = c.number(c.Next())
		c.emit(h)
	default:
		c.need("a value")
	}
	return 1
}

// match encodes a condition, or the verdict of a map.
func (c *compiler) match() {
	about := c.Words.Begins
	switch {
	case c.Accept("fib saddr type local"), c.Accept("fib daddr type local"):
		source := about("fib saddr")
		c.emit(&expr.Fib{Register: firstReg, ResultADDRTYPE: true, FlagSADDR: source, FlagDADDR: !source},
			&expr.Cmp{Op: expr.CmpOpEq, Register: firstReg, Data: word(unix.RTN_LOCAL)})
	case c.Accept("iifname"):
		c.emit(&expr.Meta{Key: expr.MetaKeyIIFNAME, Register: firstReg})
		c.compare(c.interfaceName)
	case c.Accept("oifname"):
		c.emit(&expr.Meta{Key: expr.MetaKeyOIFNAME, Register: firstReg})
		c.compare(c.interfaceName)
	case c.Accept("meta nfproto ipv4"):
		c.protocolFamily(unix.NFPROTO_IPV4)
	case c.Accept("meta nfproto ipv6"):
		c.protocolFamily(unix.NFPROTO_IPV6)
	case c.Accept("ct state new"):
		c.flag(expr.CtKeySTATE, expr.CtStateBitNEW, expr.CmpOpNeq)
	case c.Accept("ct state established"):
		c.flag(expr.CtKeySTATE, expr.CtStateBitESTABLISHED, expr.CmpOpNeq)
	case c.Accept("ct status dnat"):
		c.flag(expr.CtKeySTATUS, ctStatusDNAT, expr.CmpOpNeq)
	case c.Accept("ct status ! dnat"):
		c.flag(expr.CtKeySTATUS, ctStatusDNAT, expr.CmpOpEq)
	case c.Accept("ct packets >"):
		c.emit(&expr.Ct{Key: expr.CtKeyPKTS, Register: firstReg},
			&expr.Byteorder{SourceRegister: firstReg, DestRegister: firstReg, Op: expr.ByteorderHton, Len: 8, Size: 8},
			&expr.Cmp{Op: expr.CmpOpGt, Register: firstReg, Data: binary.BigEndian.AppendUint64(nil, uint64(c.number(c.Next())))})
	case c.Accept("ip saddr =="), c.Accept("ip6 saddr =="):
		c.prefix(c.address(firstReg, 12, 8), expr.CmpOpEq)
	case c.Accept("ip saddr !="), c.Accept("ip6 saddr !="):
		c.prefix(c.address(firstReg, 12, 8), expr.CmpOpNeq)
	case c.Accept("ip daddr =="), c.Accept("ip6 daddr =="):
		c.prefix(c.address(firstReg, 16, 24), expr.CmpOpEq)
	default:
		c.concatenation(firstReg)
		typ := uint32(TypeProto)
		switch {
		case about("meta "):
			typ = TypeInteger
			if about("meta l4proto") {
				typ = TypeProto
			}
		case about("th "):
			typ = TypePort
		case about("@th,"):
			c.compare(func(s string) []byte { return []byte{byte(c.number(s))} })
			return
		}
		c.compare(func(s string) []byte { return c.field(typ, s) })
	}
}

// compare compares what was loaded with a value, or looks it up in a set or a verdict map.
func (c *compiler) compare(encode func(string) []byte) {
	switch op := expr.CmpOpEq; {
	case c.Accept("vmap"):
		c.emit(&expr.Lookup{SourceRegister: firstReg, SetName: c.set(), IsDestRegSet: true, DestRegister: unix.NFT_REG_VERDICT})
	case c.Begins("@"):
		c.emit(&expr.Lookup{SourceRegister: firstReg, SetName: c.set()})
	default:
		if c.Accept("!=") {
			op = expr.CmpOpNeq
		}
		c.Accept("==")
		c.emit(&expr.Cmp{Op: op, Register: firstReg, Data: encode(c.Next())})
	}
}

// protocolFamily compares the packet's family, which the tool does in tables of the family inet.
func (c *compiler) protocolFamily(family byte) {
	c.emit(&expr.Meta{Key: expr.MetaKeyNFPROTO, Register: firstReg}, &expr.Cmp{Op: expr.CmpOpEq, Register: firstReg, Data: []byte{family}})
}

// flag compares a bit of a connection's state or status with 0.
func (c *compiler) flag(key expr.CtKey, bit uint32, op expr.CmpOp) {
	c.emit(&expr.Ct{Key: key, Register: firstReg}, masked(firstReg, bit, 0), &expr.Cmp{Op: op, Register: firstReg, Data: word(0)})
}

// ctStatusDNAT is the status of connections whose destination was translated
// (linux/netfilter/nf_conntrack_common.h, IPS_DST_NAT).
const ctStatusDNAT = 1 << 5

// prefix compares an address of the packet with a prefix. The tool loads only the bytes of the prefix, if that
// ends with a byte.
func (c *compiler) prefix(load *expr.Payload, op expr.CmpOp) {
	p, err := netip.ParsePrefix(c.Next())
	c.fail(err)
	bytes := p.Addr().AsSlice()
	if n := p.Bits() / 8; n > 0 && p.Bits()%8 == 0 {
		load.Len, bytes = uint32(n), bytes[:n]
	}
	c.emit(load)
	if len(bytes) == p.Addr().BitLen()/8 && p.Bits() != p.Addr().BitLen() {
		c.emit(c.maskedAddr(firstReg, net.CIDRMask(p.Bits(), p.Addr().BitLen())))
	}
	c.emit(&expr.Cmp{Op: op, Register: firstReg, Data: bytes})
}

// interfaceName returns a whole name, or the beginning of names, as rules compare it.
func (c *compiler) interfaceName(quoted string) []byte {
	begin, isPrefix := strings.CutSuffix(quoted, `*"`)
	if isPrefix {
		quoted = begin + `"`
	}
	name, err := strconv.Unquote(quoted)
	c.fail(err)
	if isPrefix {
		return []byte(name)
	}
	return InterfaceName(name)
}

// field returns a value of a type in the notation of nft, and number one of up to 32 bits.
func (c *compiler) field(typ uint32, s string) []byte {
	b, err := appendField(nil, typ, s)
	c.fail(err)
	return b
}

func (c *compiler) number(s string) uint32 {
	return binary.NativeEndian.Uint32(c.field(TypeInteger, s))
}

func (c *compiler) fail(err error) {
	if c.err == nil {
		c.err = err
	}
}

func (c *compiler) addrLen() uint32 {
	if c.v6 {
		return 16
	}
	return 4
}

// address loads an address of the packet (RFC 791, RFC 8200).
func (c *compiler) address(reg, offset4, offset6 uint32) *expr.Payload {
	offset := offset4
	if c.v6 {
		offset = offset6
	}
	return &expr.Payload{DestRegister: reg, Base: expr.PayloadBaseNetworkHeader, Offset: offset, Len: c.addrLen()}
}

func (c *compiler) maskedAddr(reg uint32, mask []byte) expr.Any {
	return &expr.Bitwise{SourceRegister: reg, DestRegister: reg, Len: c.addrLen(), Mask: mask, Xor: make([]byte, len(mask))}
}

// port loads a port, which TCP, UDP and SCTP have at the same place.
func port(reg, offset uint32) expr.Any {
	return &expr.Payload{DestRegister: reg, Base: expr.PayloadBaseTransportHeader, Offset: offset, Len: 2}
}

// word returns v in the kernel's byte order.
func word(v uint32) []byte { return binary.NativeEndian.AppendUint32(nil, v) }

// masked sets the register to (itself AND mask) XOR xor.
func masked(reg, mask, xor uint32) expr.Any {
	return &expr.Bitwise{SourceRegister: reg, DestRegister: reg, Len: 4, Mask: word(mask), Xor: word(xor)}
}
