package fake

import (
	"fmt"
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/go-proxier/proxier/internal/nft"
	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/tracker"
)

// rule is a rule that was read.
type rule struct {
	text  string
	steps []step
	// chains and sets are those that the rule refers to.
	chains, sets []string
	// buckets is the number of results of a random number or hash in the rule, 0 for none.
	buckets int
}

// step is a statement or a match. It returns false if the rule ends there.
type step func(*packet, *state) bool

// operand appends a value as nft writes it, and returns false without a value.
type operand func(*packet, *state, []byte) ([]byte, bool)

// packet is the first packet of a connection in a hook of netfilter, with the result of a random choice.
type packet struct {
	ruleset.Packet
	family, protocol string // as nft writes them
	// scratch has room for the values of a step, and spare holds unused lists.
	scratch [128]byte
	spare   []ways

	table  *table
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

// parser reads a rule.
type parser struct {
	nft.Words
	*rule
	unknown bool // a value is of no known kind
}

func parseRule(text string) (*rule, error) {
	p := &parser{Words: nft.Words(text), rule: &rule{text: text}}
	for p.Words != "" {
		before := p.Words
		if p.steps = append(p.steps, p.statement()); p.unknown {
			return nil, fmt.Errorf("rule from %q: %w", before, syscall.EOPNOTSUPP)
		}
	}
	return p.rule, nil
}

// set reads a word like "@services".
func (p *parser) set() string {
	name := strings.TrimPrefix(p.Next(), "@")
	p.sets = append(p.sets, name)
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
		p.chains = append(p.chains, chain)
		return leads(verb, chain)
	case p.Accept("flow add"):
		p.Next()
		return func(*packet, *state) bool { return true }
	case p.Accept("update"), p.Accept("delete"):
		return p.update()
	case p.Accept("dnat ip to"), p.Accept("dnat ip6 to"):
		return p.dnat()
	case p.Accept("meta priority set none"):
		return func(_ *packet, s *state) bool {
			s.priority = 0
			return true
		}
	case p.Accept("meta priority set"):
		return assign(p.value(), func(s *state, v uint32) { s.priority = v })
	case p.Accept("meta mark set"):
		return assign(p.value(), func(s *state, v uint32) { s.mark = v })
	case p.Accept("meta l4proto { tcp, udp, sctp }"):
		return func(*packet, *state) bool { return true }
	}
	return p.match()
}

func leads(verb, chain string) step {
	return func(w *packet, _ *state) bool {
		w.verb, w.chain = verb, chain
		return false
	}
}

// assign stores a number.
func assign(value operand, store func(*state, uint32)) step {
	return func(w *packet, s *state) bool {
		v, ok := value(w, s, w.scratch[:0])
		if ok {
			store(s, number(string(v)))
		}
		return ok
	}
}

// update reads a change of a set by packets. Only the timeout of a client has an effect: [Tables.Handle] is
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
		if !ok {
			return false
		}
		host, service, _ := strings.Cut(string(v), " . ")
		addr, err := netip.ParseAddr(host)
		if err != nil {
			return false
		}
		s.to, s.translated, s.verdict = netip.AddrPortFrom(addr, uint16(number(service))), true, ruleset.ActionPass
		return false
	}
}

// value reads a key, or what a map has for a key.
func (p *parser) value() operand {
	key := p.concatenation()
	if !p.Accept("map") {
		return key
	}
	return lookup(key, p.set())
}

func lookup(key operand, set string) operand {
	return func(w *packet, s *state, b []byte) ([]byte, bool) {
		k, ok := key(w, s, b)
		if !ok {
			return nil, false
		}
		data, ok := w.table.sets[set].find(k[len(b):])
		return append(b, data...), ok
	}
}

func (p *parser) concatenation() operand {
	fields := []operand{p.operand()}
	for p.Accept(".") {
		fields = append(fields, p.operand())
	}
	if len(fields) == 1 {
		return fields[0]
	}
	return func(w *packet, s *state, b []byte) ([]byte, bool) {
		ok := true
		for i, f := range fields {
			if i != 0 {
				b = append(b, " . "...)
			}
			if b, ok = f(w, s, b); !ok {
				return nil, false
			}
		}
		return b, true
	}
}

// is returns an operand that there always is.
func is(load func(*packet, *state, []byte) []byte) operand {
	return func(w *packet, s *state, b []byte) ([]byte, bool) { return load(w, s, b), true }
}

func (p *parser) operand() operand {
	switch {
	case p.Accept("ip saddr"), p.Accept("ip6 saddr"):
		bits := -1
		if p.Accept("&") {
			bits = 0
			mask, _ := netip.ParseAddr(p.Next())
			for _, b := range mask.AsSlice() {
				for ; b != 0; b <<= 1 {
					bits++
				}
			}
		}
		return is(func(w *packet, _ *state, b []byte) []byte {
			if bits < 0 {
				return w.From.AppendTo(b)
			}
			prefix, _ := w.From.Prefix(bits)
			return prefix.Addr().AppendTo(b)
		})
	case p.Accept("ip daddr"), p.Accept("ip6 daddr"), p.Accept("ct original ip daddr"), p.Accept("ct original ip6 daddr"):
		return is(func(_ *packet, s *state, b []byte) []byte { return s.to.Addr().AppendTo(b) })
	case p.Accept("th dport"), p.Accept("ct original proto-dst"):
		return is(func(_ *packet, s *state, b []byte) []byte { return strconv.AppendUint(b, uint64(s.to.Port()), 10) })
	case p.Accept("meta l4proto"), p.Accept("ct protocol"):
		return is(func(w *packet, _ *state, b []byte) []byte { return append(b, w.protocol...) })
	case p.Accept("iifname"):
		return is(func(w *packet, _ *state, b []byte) []byte { return append(append(append(b, '"'), w.in()...), '"') })
	case p.Accept("oifname"):
		return is(func(w *packet, s *state, b []byte) []byte { return append(append(append(b, '"'), w.out(s)...), '"') })
	case p.Accept("meta priority"):
		mask, other := p.mask()
		return is(func(_ *packet, s *state, b []byte) []byte { return appendClassID(b, s.priority&mask|other) })
	case p.Accept("meta mark"):
		mask, other := p.mask()
		return is(func(_ *packet, s *state, b []byte) []byte { return fmt.Appendf(b, "0x%08x", s.mark&mask|other) })
	case p.Accept("numgen random mod"):
		p.buckets = int(number(p.Next()))
		return is((*packet).choice)
	case p.Accept("jhash ip saddr"), p.Accept("jhash ip6 saddr"):
		by := tracker.HashSource
		if p.Accept(". th sport") {
			by = tracker.HashSourcePort
		}
		p.Accept("mod")
		n := int(number(p.Next()))
		p.buckets = n
		p.Accept("seed")
		p.Next()
		return is(func(w *packet, s *state, b []byte) []byte {
			s.hash, s.buckets = by, n
			return w.choice(s, b)
		})
	}
	p.unknown = true
	return nil
}

// choice appends the result of a random choice.
func (w *packet) choice(_ *state, b []byte) []byte {
	w.chose = true
	return strconv.AppendInt(b, int64(w.bucket), 10)
}

// mask reads "& mask" or "| bits".
func (p *parser) mask() (mask, bits uint32) {
	if p.Accept("|") {
		return ^uint32(0), number(p.Next())
	}
	if p.Accept("&") {
		return number(p.Next()), 0
	}
	return ^uint32(0), 0
}

// match reads a condition, or the verdict of a map.
func (p *parser) match() step {
	always := func(v bool) step { return func(*packet, *state) bool { return v } }
	switch {
	case p.Accept("ct state new"):
		return always(true)
	case p.Accept("ct state established"):
		return always(false)
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
	value := p.concatenation()
	switch {
	case p.Accept("vmap"):
		verdict := lookup(value, p.set())
		return func(w *packet, s *state) bool {
			v, ok := verdict(w, s, w.scratch[:0])
			if ok {
				w.verb, w.chain, _ = strings.Cut(string(v), " ")
			}
			return false
		}
	case p.Begins("@"):
		in := lookup(value, p.set())
		return func(w *packet, s *state) bool { _, ok := in(w, s, w.scratch[:0]); return ok }
	}
	differs := p.Accept("!=")
	p.Accept("==")
	equal := equals(p.Next())
	return func(w *packet, s *state) bool {
		v, ok := value(w, s, w.scratch[:0])
		return ok && equal(string(v)) != differs
	}
}

// equals returns a comparison with a value in a rule, which may be a prefix of addresses or of names.
func equals(want string) func(string) bool {
	if prefix, err := netip.ParsePrefix(want); err == nil {
		return func(v string) bool {
			a, err := netip.ParseAddr(v)
			return err == nil && prefix.Contains(a)
		}
	}
	if begin, ok := strings.CutSuffix(want, `*"`); ok {
		return func(v string) bool { return strings.HasPrefix(v, begin) }
	}
	if want == "none" {
		want = string(appendClassID(nil, 0))
	}
	return func(v string) bool { return v == want }
}

// find returns the data of the element with a key.
func (s *set) find(key []byte) (string, bool) {
	if !s.interval {
		e, ok := s.elements[string(key)]
		return e.data, ok
	}
	if len(s.elements) == 0 {
		return "", false
	}
	var values []interval
	for field := range strings.SplitSeq(string(key), " . ") {
		values = append(values, parseInterval(field))
	}
	for _, e := range s.elements {
		if slices.EqualFunc(e.fields, values, interval.contains) {
			return e.data, true
		}
	}
	return "", false
}

// interval is a field of the key of a set of intervals: addresses, ports or another value.
type interval struct {
	text        string
	first, last netip.Addr // invalid if the field is not of addresses
	prefix      netip.Prefix
	from, to    uint32 // as numbers
}

func parseInterval(field string) (out interval) {
	out.text = field
	if strings.Contains(field, "/") {
		out.prefix, _ = netip.ParsePrefix(field)
	}
	first, last, ok := strings.Cut(field, "-")
	if !ok {
		last = first
	}
	out.first, _ = netip.ParseAddr(first)
	out.last, _ = netip.ParseAddr(last)
	out.from, out.to = number(first), number(last)
	return out
}

// contains reports whether i contains a single value.
func (i interval) contains(v interval) bool {
	if v.first.IsValid() {
		return i.first.IsValid() && i.first.Compare(v.first) <= 0 && v.first.Compare(i.last) <= 0 || i.prefix.Contains(v.first)
	}
	return i.text == v.text || i.from < i.to && i.from <= v.from && v.from <= i.to
}

// appendClassID appends a number as nft writes the priority of a packet, and number reads numbers of all kinds.
func appendClassID(b []byte, v uint32) []byte {
	b = append(strconv.AppendUint(b, uint64(v>>16), 16), ':')
	return strconv.AppendUint(b, uint64(v&0xffff), 16)
}

func number(text string) uint32 {
	if major, minor, ok := strings.Cut(text, ":"); ok {
		a, _ := strconv.ParseUint(major, 16, 16)
		b, _ := strconv.ParseUint(minor, 16, 16)
		return uint32(a<<16 | b)
	}
	v, _ := strconv.ParseUint(text, 0, 32)
	return uint32(v)
}
