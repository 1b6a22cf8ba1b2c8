package iptables

import (
	"encoding/binary"
	"encoding/hex"
	"math/bits"
	"net/netip"
	"slices"
	"strconv"
	"strings"

	"github.com/go-proxier/proxier/internal/iptext"
	v1 "k8s.io/api/core/v1"
)

// dispatcher describes a tree of chains that leads a packet to the one rule for its destination. A chain with few
// rules holds them itself. More are divided by the first two bits in which they differ, of destination address,
// protocol and port, in this order. A packet meets some rules on each of the O(log N) chains on its way, and adding
// or removing a rule changes a few small chains. The shape of the tree depends only on the rules in it.
type dispatcher struct {
	table table
	// root is the name of the first chain. The names of all others begin with prefix.
	root, prefix string
}

// The dispatchers: indices of [dispatchers] and model.trees.
const (
	toServices = iota
	toNodePorts
	refusedAddresses
	refusedNodePorts
	healthNodePorts
	firewalled
	clusterIPs
)

// In table nat, chains that lead to a Service's have names that kube-proxy takes for its own, so that it deletes
// both.
var dispatchers = [...]dispatcher{
	toServices:       {nat, chainServices, prefixService + "IP-"},
	toNodePorts:      {nat, chainNodePorts, prefixExternal + "NP-"},
	refusedAddresses: {filter, chainExternalServices, "KUBE-EXTS-"},
	refusedNodePorts: {filter, chainRefusedNodePorts, "KUBE-RNPS-"},
	healthNodePorts:  {filter, chainNodePorts, "KUBE-HCNPS-"},
	firewalled:       {filter, chainFirewall, "KUBE-FWS-"},
	clusterIPs:       {filter, chainClusterIPs, "KUBE-CIPS-"},
}

// key is the destination that a dispatched rule matches: the bytes of the address, except in trees of NodePorts, then
// one for the protocol and two for the port, except in the tree of cluster IPs. All keys of a tree have one length.
type key string

const maxKeyBits = 128 + 8 + 16

// stride is the number of bits by which a chain divides its rules.
const stride = 2

// leafRules is how many rules a chain below the first holds undivided. firstRules is the same for the first chain, so
// that small clusters have the single chain that operators know.
const (
	leafRules  = 12
	firstRules = 100
)

var protocols = [...]v1.Protocol{v1.ProtocolTCP, v1.ProtocolUDP, v1.ProtocolSCTP}

// keyOf returns the key of an address, protocol and port. The zero Addr adds no bytes.
func keyOf(a netip.Addr, p v1.Protocol, port uint16) key {
	b := binary.BigEndian.AppendUint16(append(a.AsSlice(), byte(slices.Index(protocols[:], p))<<6), port)
	return key(b)
}

func (k key) bitsAt(i int) int { return int(k[i/8]>>(8-stride-i%8)) & (1<<stride - 1) }

// common returns the length in bits of the common prefix of k and o, rounded down to the stride.
func (k key) common(o key) int {
	n := 0
	for n < len(k) && n < len(o) && k[n] == o[n] {
		n++
	}
	i := 8 * n
	if n < len(k) && n < len(o) {
		i += bits.LeadingZeros8(k[n] ^ o[n])
	}
	return i / stride * stride
}

// prefix returns k with all bits cleared except the first n.
func (k key) prefix(n int) key {
	b := []byte(k)
	for i := range b {
		switch have := n - 8*i; {
		case have <= 0:
			b[i] = 0
		case have < 8:
			b[i] &= 0xff << (8 - have)
		}
	}
	return key(b)
}

// dispatched is a rule with the destination that it matches.
type dispatched struct {
	key  key
	rule string
	// before, unless it is "", is a rule ahead of it that matches some of the same packets. It does not count in
	// limits.
	before string
}

func (d dispatched) ahead() int {
	if d.before == "" {
		return 0
	}
	return 1
}

func (d dispatched) appendTo(rules []string) []string {
	if d.before != "" {
		rules = append(rules, d.before)
	}
	return append(rules, d.rule)
}

// node is a node of a trie. A node with rules is one chain. One without leads to at least two others, and shares a
// chain with those of its order.
type node struct {
	// prefixLen is the length in bits of the prefix that the chain leading here matches, which the chain's name
	// contains. sample is some key at or below the node. All of them share its first at bits.
	prefixLen int
	sample    key
	rules     []dispatched // sorted; nil if it leads to others
	at        int          // the first of the bits by which it divides
	kids      *[1 << stride]*node
	count     int // rules at or below it
}

// order is the order of magnitude of n.count. A node begins a chain if it is of a smaller order than the node above
// it, so at most six chains lead to each other: nf_tables allows 15.
func (n *node) order() (order int) {
	for most := leafRules; most < n.count; most *= leafRules {
		order++
	}
	return order
}

type tree struct {
	dispatcher
	addrBits int // of the address in a key
	first    *node
	// ahead is how many rules are ahead of others.
	ahead int
	// changed holds, by name, the chains that have changed since it was last cleared; nil stands for a deleted chain.
	// It is nil at first: all chains are new.
	changed map[string]*node
}

func newTree(d dispatcher, addrBits int) *tree {
	return &tree{dispatcher: d, addrBits: addrBits, first: &node{}}
}

func (t *tree) limit(n *node) int {
	if n == t.first {
		return firstRules
	}
	return leafRules
}

func (t *tree) touch(n *node) {
	if t.changed != nil {
		t.changed[t.name(n)] = n
	}
}

// find returns the chain for a key and the rule's index there, -1 if it has none.
func (t *tree) find(k key) (n *node, i int) {
	for n = t.first; n.kids != nil; n = n.kids[k.bitsAt(n.at)] {
		if n.sample.common(k) < n.at || n.kids[k.bitsAt(n.at)] == nil {
			return nil, -1
		}
	}
	return n, slices.IndexFunc(n.rules, func(d dispatched) bool { return d.key == k })
}

// put adds a rule or replaces the one with the same key.
func (t *tree) put(d dispatched) {
	n, i := t.find(d.key)
	switch {
	case i < 0:
		t.ahead += d.ahead()
		t.alter(d.key, func() { t.insert(t.first, d) })
	case n.rules[i] != d:
		t.ahead += d.ahead() - n.rules[i].ahead()
		n.rules[i] = d
		t.touch(n)
	}
}

// remove removes a rule if the tree has it. Another rule with the same key stays.
func (t *tree) remove(d dispatched) {
	if n, i := t.find(d.key); i >= 0 && n.rules[i] == d {
		t.ahead -= d.ahead()
		t.alter(d.key, func() { t.delete(t.first, d.key) })
	}
}

// alter records which chains differ after do, which adds or removes the rule of a key.
func (t *tree) alter(k key, do func()) {
	if t.changed == nil {
		do()
		return
	}
	all := t.first.count <= firstRules+1 // the first chain may divide or be joined
	before := t.around(k, all)
	do()
	after := t.around(k, all)
	for name := range before {
		if _, ok := after[name]; !ok {
			t.changed[name] = nil
		}
	}
	for name, c := range after {
		if was, ok := before[name]; !ok || !slices.Equal(was.rules, c.rules) {
			t.changed[name] = c.node
		}
	}
}

// view is a chain with its rules, nil if they do not depend on the key in question.
type view struct {
	*node
	rules []string
}

// around returns the chains on the way to a key and beside it, or all.
func (t *tree) around(k key, all bool) map[string]view {
	out := map[string]view{t.root: {t.first, t.rules(t.first)}}
	if all {
		t.first.walk(func(n *node) { out[t.name(n)] = view{n, t.rules(n)} })
		return out
	}
	for n := t.first; n != nil && n.kids != nil && n.sample.common(k) >= n.at; n = n.kids[k.bitsAt(n.at)] {
		for i, kid := range n.kids {
			if kid == nil || kid.order() == n.order() {
				continue
			}
			v := view{node: kid}
			if i == k.bitsAt(n.at) {
				v.rules = t.rules(kid)
			}
			out[t.name(kid)] = v
		}
	}
	return out
}

// insert adds a rule whose key has none.
func (t *tree) insert(n *node, d dispatched) {
	n.count++
	if n.kids == nil {
		i, _ := slices.BinarySearchFunc(n.rules, d.key, func(x dispatched, k key) int { return strings.Compare(string(x.key), string(k)) })
		n.rules = slices.Insert(n.rules, i, d)
		n.sample = d.key
		t.divide(n)
		return
	}
	if at := n.sample.common(d.key); at < n.at {
		// The key differs from all others at an earlier bit than they do from each other.
		others := &node{prefixLen: at + stride, sample: n.sample, at: n.at, kids: n.kids, count: n.count - 1}
		n.at, n.kids = at, new([1 << stride]*node)
		n.kids[others.sample.bitsAt(at)] = others
	}
	i := d.key.bitsAt(n.at)
	if n.kids[i] == nil {
		n.kids[i] = &node{prefixLen: n.at + stride}
	}
	t.insert(n.kids[i], d)
}

// divide moves the rules of a node that has too many to new ones.
func (t *tree) divide(n *node) {
	if len(n.rules) <= t.limit(n) {
		return
	}
	rules := n.rules
	n.at = rules[0].key.common(rules[len(rules)-1].key)
	n.kids, n.rules = new([1 << stride]*node), nil
	for i := range n.kids {
		end := 0
		for end < len(rules) && rules[end].key.bitsAt(n.at) == i {
			end++
		}
		if end != 0 {
			n.kids[i] = &node{prefixLen: n.at + stride, sample: rules[0].key, rules: slices.Clone(rules[:end]), count: end}
			t.divide(n.kids[i])
		}
		rules = rules[end:]
	}
}

func (t *tree) delete(n *node, k key) {
	n.count--
	if n.kids == nil {
		n.rules = slices.DeleteFunc(n.rules, func(d dispatched) bool { return d.key == k })
		return
	}
	i := k.bitsAt(n.at)
	if t.delete(n.kids[i], k); n.kids[i].count == 0 {
		n.kids[i] = nil
	}
	if n.count <= t.limit(n) {
		n.rules, n.kids = n.collect(nil), nil
		return
	}
	var last *node
	for _, kid := range n.kids {
		switch {
		case kid == nil:
		case last != nil:
			return
		default:
			last = kid
		}
	}
	// The rules are too many for one chain, so the only child left leads to others.
	n.sample, n.at, n.kids, n.rules = last.sample, last.at, last.kids, last.rules
}

func (n *node) collect(rules []dispatched) []dispatched {
	if n.kids == nil {
		return append(rules, n.rules...)
	}
	for _, kid := range n.kids {
		if kid != nil {
			rules = kid.collect(rules)
		}
	}
	return rules
}

// size returns the number of rules in the tree: the rules of its keys and the jumps between
// its chains.
func (t *tree) size() int {
	n := t.first.count + t.ahead - 1
	t.first.walk(func(*node) { n++ }) // one rule leads to each chain but the first
	return n
}

// walk calls f with the chain of n and every one below it, after all chains that it leads to.
func (n *node) walk(f func(*node)) {
	n.next(func(kid *node) { kid.walk(f) })
	f(n)
}

// next calls f with the chains that the chain of n leads to.
func (n *node) next(f func(*node)) {
	if n.kids == nil {
		return
	}
	for _, kid := range n.kids {
		switch {
		case kid == nil:
		case kid.order() < n.order():
			f(kid)
		default:
			kid.next(f)
		}
	}
}

// name returns the name of a chain, at most the 28 bytes that the kernel allows (XT_EXTENSION_MAXNAMELEN, less the
// NUL), with the range of addresses in hexadecimal, or the protocol and range of ports.
func (t *tree) name(n *node) string {
	if n.prefixLen == 0 {
		return t.root
	}
	prefix := n.sample.prefix(n.prefixLen)
	switch {
	case t.addrBits == 32 && n.prefixLen <= 32:
		return t.prefix + strings.ToUpper(hex.EncodeToString([]byte(prefix[:4]))) + "/" + strconv.Itoa(n.prefixLen)
	case t.addrBits == 0:
		p := string(protocols[prefix[0]>>6])
		if n.prefixLen <= 8 {
			return t.prefix + p
		}
		return t.prefix + p + "-" + strings.ToUpper(hex.EncodeToString([]byte(prefix[1:]))) + "/" + strconv.Itoa(n.prefixLen-8)
	}
	return t.prefix + hashOf(string(prefix), strconv.Itoa(n.prefixLen))
}

func (t *tree) rules(n *node) []string {
	var out []string
	for _, d := range n.rules {
		out = d.appendTo(out)
	}
	// After a goto, a packet that matches nothing returns to the first chain immediately.
	how := "-g "
	if n == t.first {
		how = "-j "
	}
	n.next(func(kid *node) { out = append(out, t.match(kid)+" "+how+t.name(kid)) })
	return out
}

func (t *tree) match(n *node) string {
	prefix, size := n.sample.prefix(n.prefixLen), t.addrBits/8
	var out []string
	if size != 0 {
		a, _ := netip.AddrFromSlice([]byte(prefix[:size]))
		out = append(out, iptext.Destination(netip.PrefixFrom(a, min(n.prefixLen, t.addrBits))))
	}
	if n.prefixLen > t.addrBits {
		p := iptext.Protocol(protocols[prefix[size]>>6])
		out = append(out, "-p "+p)
		if free := t.addrBits + 24 - n.prefixLen; free < 16 {
			from := binary.BigEndian.Uint16([]byte(prefix[size+1:]))
			match := iptext.DestinationPort(p, from)
			if free != 0 {
				match += ":" + strconv.Itoa(int(from)|(1<<free-1))
			}
			out = append(out, match)
		}
	}
	return iptext.Join(out...)
}
