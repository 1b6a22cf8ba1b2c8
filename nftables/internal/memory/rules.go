package memory

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"net/netip"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/go-proxier/proxier/internal/inet"
	"github.com/go-proxier/proxier/internal/nft"
	"github.com/go-proxier/proxier/nftables/internal/layout"
	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/tracker"
)

// Rule is a rule that was read.
type Rule struct {
	Handle uint64
	text   string
	steps  []step
	refers []string
	// buckets is the number of results of a random number or hash in the rule, 0 for none.
	buckets int
}

// step is a statement or a match. It returns false if the rule ends there.
type step func(*packet, *state) bool

// operand appends a value as a register has it, and returns false without a value.
type operand func(*packet, *state, []byte) ([]byte, bool)

// packet is the first packet of a connection in a hook of netfilter, with the result of a random choice.
type packet struct {
	ruleset.Packet
	family string // as nft writes it
	// scratch has room for the values of a step, and spare holds unused lists.
	scratch [128]byte
	spare   []ways

	table  *Table
	hook   string
	bucket int
	chose  bool // a rule used the result
	depth  int  // of chains
	// state is that after the last rule.
	state state
	// verb and chain are what a rule ended with: "jump", "goto" or "return".
	verb, chain string
}

// state is what rules change.
type state struct {
	priority, mark         uint32
	to                     netip.AddrPort
	translated, masquerade bool
	affinity               time.Duration
	hash                   tracker.Hash
	buckets                int // of the hash
	verdict                ruleset.Action
}

type parser struct {
	nft.Words
	*Rule
	unknown bool // a value is of no known kind
}

func parseRule(text string) (*Rule, error) {
	p := &parser{Words: nft.Words(text), Rule: &Rule{text: text}}
	for p.Words != "" {
		before := p.Words
		if p.steps = append(p.steps, p.statement()); p.unknown {
			return nil, fmt.Errorf("rule from %q: %w", before, syscall.EOPNOTSUPP)
		}
	}
	return p.Rule, nil
}

// set reads a word like "@services".
func (p *parser) set() string {
	name := strings.TrimPrefix(p.Next(), "@")
	p.refers = append(p.refers, name)
	return name
}

func ends(verdict ruleset.Action) step {
	return func(_ *packet, s *state) bool {
		s.verdict = verdict
		return false
	}
}

func (p *parser) statement() step {
	switch {
	case p.Accept("drop"):
		return ends(ruleset.ActionDrop)
	case p.Accept("reject"):
		return ends(ruleset.ActionReject)
	case p.Accept("masquerade fully-random"):
		return func(_ *packet, s *state) bool {
			s.masquerade, s.verdict = true, ruleset.ActionPass
			return false
		}
	case p.Accept("return"):
		return leads("return", "")
	case p.Begins("jump "), p.Begins("goto "):
		verb, chain := p.Next(), p.Next()
		p.refers = append(p.refers, chain)
		return leads(verb, chain)
	case p.Accept("flow add"):
		p.Next()
		return always(true)
	case p.Accept("update"), p.Accept("delete"):
		return p.update()
	case p.Accept("dnat ip to"), p.Accept("dnat ip6 to"):
		return p.dnat()
	case p.Accept("meta priority set"):
		return assign(p.value(), func(s *state, v uint32) { s.priority = v })
	case p.Accept("meta mark set"):
		return assign(p.value(), func(s *state, v uint32) { s.mark = v })
	case p.Accept("meta l4proto { tcp, udp, sctp }"), p.Accept("ct state new"):
		return always(true)
	case p.Accept("ct state established"):
		return always(false)
	}
	return p.match()
}

func always(v bool) step { return func(*packet, *state) bool { return v } }

func leads(verb, chain string) step {
	return func(w *packet, _ *state) bool {
		w.verb, w.chain = verb, chain
		return false
	}
}

func assign(value operand, store func(*state, uint32)) step {
	return func(w *packet, s *state) bool {
		v, ok := value(w, s, w.scratch[:0])
		if ok = ok && len(v) >= 4; ok {
			store(s, binary.NativeEndian.Uint32(v))
		}
		return ok
	}
}

// update reads a change of a set by packets. Only the timeout of a client has an effect: [Kernel.Handle] is
// about new clients.
func (p *parser) update() step {
	p.set()
	var timeout time.Duration
	for word := p.Next(); word != "}" && word != ""; word = p.Next() {
		if word == "timeout" {
			timeout, _ = time.ParseDuration(p.Next())
		}
	}
	return func(_ *packet, s *state) bool {
		s.affinity = max(s.affinity, timeout)
		return true
	}
}

// dnat reads a translation to an address and port.
func (p *parser) dnat() step {
	value := p.value()
	return func(w *packet, s *state) bool {
		v, ok := value(w, s, w.scratch[:0])
		to, sound := layout.ParseAddrPort(v)
		if ok && sound {
			s.to, s.translated, s.verdict = to, true, ruleset.ActionPass
		}
		return false
	}
}

// value reads a key, or what a map has for a key.
func (p *parser) value() operand {
	key, _ := p.concatenation()
	if !p.Accept("map") {
		return key
	}
	find := lookup(key, p.set())
	return func(w *packet, s *state, b []byte) ([]byte, bool) {
		e, ok := find(w, s, b)
		return append(b, e.Data...), ok
	}
}

func lookup(key operand, set string) func(*packet, *state, []byte) (nft.Element, bool) {
	return func(w *packet, s *state, b []byte) (nft.Element, bool) {
		k, ok := key(w, s, b)
		if !ok {
			return nft.Element{}, false
		}
		return w.table.Sets[set].find(k[len(b):])
	}
}

// concatenation reads a key. It also returns the key's type.
func (p *parser) concatenation() (operand, uint32) {
	first, typ := p.operand()
	fields, types := []operand{first}, []uint32{typ}
	for p.Accept(".") {
		f, t := p.operand()
		fields, types = append(fields, f), append(types, t)
	}
	if len(fields) == 1 {
		return first, typ
	}
	typ, _ = nft.Concat(types...)
	return func(w *packet, s *state, b []byte) ([]byte, bool) {
		for _, f := range fields {
			b, _ = f(w, s, b)
		}
		return b, true
	}, typ
}

// is returns an operand that there always is. Its values are padded as in a register.
func is(typ uint32, load func(*packet, *state, []byte) []byte) (operand, uint32) {
	return func(w *packet, s *state, b []byte) ([]byte, bool) {
		n := len(b)
		for b = load(w, s, b); (len(b)-n)%4 != 0; b = append(b, 0) {
		}
		return b, true
	}, typ
}

// word is is for numbers.
func word(typ uint32, load func(*packet, *state) uint32) (operand, uint32) {
	return is(typ, func(w *packet, s *state, b []byte) []byte { return binary.NativeEndian.AppendUint32(b, load(w, s)) })
}

// address is is for addresses, of which a rule may look at some bits.
func (p *parser) address(typ uint32, load func(*packet, *state) netip.Addr) (operand, uint32) {
	var mask []byte
	if p.Accept("&") {
		mask = p.literal(typ)
	}
	return is(typ, func(w *packet, s *state, b []byte) []byte {
		n := len(b)
		if a := load(w, s); a.Is4() {
			v := a.As4()
			b = append(b, v[:]...)
		} else {
			v := a.As16()
			b = append(b, v[:]...)
		}
		for i := range min(len(mask), len(b)-n) {
			b[n+i] &= mask[i]
		}
		return b
	})
}

func (p *parser) operand() (operand, uint32) {
	source := func(w *packet, _ *state) netip.Addr { return w.From }
	destination := func(_ *packet, s *state) netip.Addr { return s.to.Addr() }
	switch {
	case p.Accept("ip saddr"):
		return p.address(nft.TypeIPv4, source)
	case p.Accept("ip6 saddr"):
		return p.address(nft.TypeIPv6, source)
	case p.Accept("ip daddr"), p.Accept("ct original ip daddr"):
		return p.address(nft.TypeIPv4, destination)
	case p.Accept("ip6 daddr"), p.Accept("ct original ip6 daddr"):
		return p.address(nft.TypeIPv6, destination)
	case p.Accept("th dport"), p.Accept("tcp dport"), p.Accept("udp dport"), p.Accept("sctp dport"), p.Accept("ct original proto-dst"):
		return is(nft.TypePort, func(_ *packet, s *state, b []byte) []byte { return binary.BigEndian.AppendUint16(b, s.to.Port()) })
	case p.Accept("meta l4proto"), p.Accept("ct protocol"):
		return is(nft.TypeProto, func(w *packet, _ *state, b []byte) []byte { return append(b, inet.Protocol(w.Protocol)) })
	case p.Accept("iifname"):
		return is(nft.TypeIfname, func(w *packet, _ *state, b []byte) []byte { return append(b, nft.InterfaceName(w.in())...) })
	case p.Accept("oifname"):
		return is(nft.TypeIfname, func(w *packet, s *state, b []byte) []byte { return append(b, nft.InterfaceName(w.out(s))...) })
	case p.Accept("meta priority"):
		mask, other := p.mask(nft.TypeClassID)
		return word(nft.TypeClassID, func(_ *packet, s *state) uint32 { return s.priority&mask | other })
	case p.Accept("none"):
		return word(nft.TypeClassID, func(*packet, *state) uint32 { return 0 })
	case p.Accept("meta mark"):
		mask, other := p.mask(nft.TypeMark)
		return word(nft.TypeMark, func(_ *packet, s *state) uint32 { return s.mark&mask | other })
	case p.Accept("numgen random mod"):
		p.buckets, _ = strconv.Atoi(p.Next())
		return word(nft.TypeInteger, (*packet).choice)
	case p.Accept("jhash ip saddr"), p.Accept("jhash ip6 saddr"):
		by := tracker.HashSource
		if p.Accept(". th sport") {
			by = tracker.HashSourcePort
		}
		p.Accept("mod")
		p.buckets, _ = strconv.Atoi(p.Next())
		n := p.buckets
		p.Accept("seed")
		p.Next()
		return word(nft.TypeInteger, func(w *packet, s *state) uint32 {
			s.hash, s.buckets = by, n
			return w.choice(s)
		})
	}
	p.unknown = true
	return nil, 0
}

func (w *packet) choice(*state) uint32 {
	w.chose = true
	return uint32(w.bucket)
}

// literal reads a value of a type.
func (p *parser) literal(typ uint32) []byte {
	v, err := nft.ParseValue(typ, p.Next())
	p.unknown = p.unknown || err != nil
	return v
}

func (p *parser) mask(typ uint32) (mask, bits uint32) {
	number := func() (v uint32) {
		if b := p.literal(typ); len(b) == 4 {
			v = binary.NativeEndian.Uint32(b)
		}
		return v
	}
	if p.Accept("|") {
		return ^uint32(0), number()
	}
	if p.Accept("&") {
		return number(), 0
	}
	return ^uint32(0), 0
}

// match reads a condition, or the verdict of a map.
func (p *parser) match() step {
	switch {
	case p.Accept("ct packets >"):
		p.Next()
		return always(false)
	case p.Accept("ct status dnat"):
		return func(_ *packet, s *state) bool { return s.translated }
	case p.Accept("ct status ! dnat"):
		return func(_ *packet, s *state) bool { return !s.translated }
	case p.Accept("fib saddr type local"):
		return func(w *packet, _ *state) bool { return w.local(w.From) }
	case p.Accept("fib daddr type local"):
		return func(w *packet, s *state) bool { return w.local(s.to.Addr()) }
	}
	value, typ := p.concatenation()
	switch {
	case p.Accept("vmap"):
		verdict := lookup(value, p.set())
		return func(w *packet, s *state) bool {
			if e, ok := verdict(w, s, w.scratch[:0]); ok {
				w.verb, w.chain = map[bool]string{true: "goto", false: "jump"}[e.Goto], e.Chain
			}
			return false
		}
	case p.Begins("@"):
		in := lookup(value, p.set())
		return func(w *packet, s *state) bool { _, ok := in(w, s, w.scratch[:0]); return ok }
	}
	differs := p.Accept("!=")
	p.Accept("==")
	equal := p.comparison(typ)
	return func(w *packet, s *state) bool {
		v, ok := value(w, s, w.scratch[:0])
		return ok && equal(v) != differs
	}
}

// comparison reads a value in a rule, which may be a prefix of addresses or of names.
func (p *parser) comparison(typ uint32) func([]byte) bool {
	next, _, _ := strings.Cut(string(p.Words), " ")
	if prefix, err := netip.ParsePrefix(next); err == nil {
		p.Next()
		return func(v []byte) bool {
			a, ok := netip.AddrFromSlice(v)
			return ok && prefix.Contains(a)
		}
	}
	if begin, ok := strings.CutSuffix(next, `*"`); ok {
		p.Next()
		return func(v []byte) bool { return bytes.HasPrefix(v, []byte(begin[1:])) }
	}
	want := p.literal(typ)
	return func(v []byte) bool { return bytes.Equal(v, want) }
}
