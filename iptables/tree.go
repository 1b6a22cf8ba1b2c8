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

// dispatcher describes a tree of chains that leads a packet to the one rule for its
// destination. A chain with few rules holds them itself. A chain with more divides them
// by the first two bits in which they differ, of destination address, protocol and port,
// in this order. A packet meets a few rules on each of the O(log N) chains on its way,
// and adding or removing a rule changes one small chain.
//
// The shape of the tree depends only on the rules in it, not on their history.
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

// In table nat, chains that lead to a Service's have names that kube-proxy takes for its own:
// it deletes them with the Service's chains, which it could not delete otherwise.
var dispatchers = [...]dispatcher{
	toServices:       {nat, chainServices, prefixService + "IP-"},
	toNodePorts:      {nat, chainNodePorts, prefixExternal + "NP-"},
	refusedAddresses: {filter, chainExternalServices, "KUBE-EXTS-"},
	refusedNodePorts: {filter, chainRefusedNodePorts, "KUBE-RNPS-"},
	healthNodePorts:  {filter, chainNodePorts, "KUBE-HCNPS-"},
	firewalled:       {filter, chainFirewall, "KUBE-FWS-"},
	clusterIPs:       {filter, chainClusterIPs, "KUBE-CIPS-"},
}

// key is the destination that a dispatched rule matches: the bytes of the address, except
// in trees of NodePorts, then one for the protocol and two for the port, except in the
// tree of cluster IPs. All keys of a tree have the same length.
type key string

// maxKeyBits is the length of the longest key.
const maxKeyBits = 128 + 8 + 16

// stride is the number of bits by which a chain divides its rules.
const stride = 2

// leafRules is how many rules a chain below the first holds undivided. firstRules is the
// same for the first chain, so that small clusters have the single chain that operators
// know.
const (
	leafRules  = 12
	firstRules = 100
)

// protocols holds the protocols in the order of their two bits in a key.
var protocols = [...]v1.Protocol{v1.ProtocolTCP, v1.ProtocolUDP, v1.ProtocolSCTP}

// keyOf returns the key of an address, protocol and port. The zero Addr adds no bytes.
func keyOf(a netip.Addr, p v1.Protocol, port uint16) key {
	b := binary.BigEndian.AppendUint16(append(a.AsSlice(), byte(slices.Index(protocols[:], p))<<6), port)
	return key(b)
}

// bitsAt returns the stride bits at bit i.
func (k key) bitsAt(i int) int { return int(k[i/8]>>(8-stride-i%8)) & (1<<stride - 1) }

// common returns the length in bits of the common prefix of k and o, rounded down to the
// stride.
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
	// before, unless it is "", is a rule ahead of it that matches some of the same
	// packets. The limits leafRules and firstRules do not count it.
	before string
}

// ahead returns how many rules are ahead of this one.
func (d dispatched) ahead() int {
	if d.before == "" {
		return 0
	}
	return 1
}

// appendTo appends the rule, after the one ahead of it.
func (d dispatched) appendTo(rules []string) []string {
	if d.before != "" {
		rules = append(rules, d.before)
	}
	return append(rules, d.rule)
}

// node is one chain of a tree. It holds rules, or leads to at least two others.
type node struct {
	// prefixLen is the length in bits of the prefix that the chain leading here matches.
	// Every key at or below the node has this prefix, and the chain's name contains it.
	// sample is some key at or below the node. All of them share its first at bits.
	prefixLen int
	sample    key
	rules     []dispatched // sorted; nil if it leads to others
	at        int          // the first of the bits by which it divides
	kids      *[1 << stride]*node
	count     int // rules at or below it
}

// tree holds the rules and chains of one dispatcher.
type tree struct {
	dispatcher
	addrBits int // of the address in a key
	first    *node
	// below is how many chains there are below the first. One rule leads to each.
	below int
	// ahead is how many rules are ahead of others.
	ahead int
	// changed holds, by name, the chains that have changed since it was last cleared; nil
	// stands for a deleted chain.
	changed map[string]*node
}

func newTree(d dispatcher, addrBits int) *tree {
	t := &tree{dispatcher: d, addrBits: addrBits, first: &node{}, changed: map[string]*node{}}
	t.touch(t.first)
	return t
}

func (t *tree) limit(n *node) int {
	if n == t.first {
		return firstRules
	}
	return leafRules
}

func (t *tree) touch(n *node) { t.changed[t.name(n)] = n }

// gone records that a chain below the first was deleted.
func (t *tree) gone(n *node) {
	t.changed[t.name(n)] = nil
	t.below--
}

// put adds a rule or replaces the one with the same key.
func (t *tree) put(d dispatched) { t.insert(t.first, d) }

func (t *tree) insert(n *node, d dispatched) (added bool) {
	if n.kids == nil {
		i, found := slices.BinarySearchFunc(n.rules, d.key, func(x dispatched, k key) int { return strings.Compare(string(x.key), string(k)) })
		if found {
			if n.rules[i] != d {
				t.ahead += d.ahead() - n.rules[i].ahead()
				n.rules[i] = d
				t.touch(n)
			}
			return false
		}
		t.ahead += d.ahead()
		n.rules = slices.Insert(n.rules, i, d)
		n.count++
		n.sample = d.key
		t.touch(n)
		t.divide(n)
		return true
	}
	if at := n.sample.common(d.key); at < n.at {
		// The key differs from all others at an earlier bit than they do from each other.
		others := &node{prefixLen: at + stride, sample: n.sample, at: n.at, kids: n.kids, count: n.count}
		n.at, n.kids = at, new([1 << stride]*node)
		n.kids[others.sample.bitsAt(at)] = others
		t.below++
		t.touch(others)
		t.touch(n)
	}
	i := d.key.bitsAt(n.at)
	if n.kids[i] == nil {
		n.kids[i] = &node{prefixLen: n.at + stride}
		n.kids[i].sample = d.key
		t.below++
		t.touch(n)
	}
	added = t.insert(n.kids[i], d)
	if added {
		n.count++
	}
	return added
}

// divide moves the rules of a chain that has too many to new chains.
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
			kid := &node{prefixLen: n.at + stride, sample: rules[0].key, rules: slices.Clone(rules[:end]), count: end}
			n.kids[i] = kid
			t.below++
			t.touch(kid)
			t.divide(kid)
		}
		rules = rules[end:]
	}
	t.touch(n)
}

// remove removes a rule if the tree has it. Another rule with the same key stays.
func (t *tree) remove(d dispatched) { t.delete(t.first, d) }

func (t *tree) delete(n *node, d dispatched) (deleted bool) {
	if n.kids == nil {
		i := slices.Index(n.rules, d)
		if i < 0 {
			return false
		}
		n.rules = slices.Delete(n.rules, i, i+1)
		n.count--
		t.ahead -= d.ahead()
		t.touch(n)
		return true
	}
	if n.sample.common(d.key) < n.at {
		return false
	}
	i := d.key.bitsAt(n.at)
	if n.kids[i] == nil || !t.delete(n.kids[i], d) {
		return false
	}
	n.count--
	if n.kids[i].count == 0 {
		t.gone(n.kids[i])
		n.kids[i] = nil
		t.touch(n)
	}
	if n.count <= t.limit(n) {
		var rules []dispatched
		for _, kid := range n.kids {
			rules = t.collapse(kid, rules)
		}
		n.rules, n.kids = rules, nil
		t.touch(n)
		return true
	}
	var last *node
	for _, kid := range n.kids {
		switch {
		case kid == nil:
		case last != nil:
			return true
		default:
			last = kid
		}
	}
	// The rules are too many for one chain, so the only child left leads to others.
	t.gone(last)
	n.sample, n.at, n.kids, n.rules = last.sample, last.at, last.kids, last.rules
	t.touch(n)
	return true
}

// collapse deletes the chains at and below n and appends their rules.
func (t *tree) collapse(n *node, rules []dispatched) []dispatched {
	if n == nil {
		return rules
	}
	t.gone(n)
	if n.kids == nil {
		return append(rules, n.rules...)
	}
	for _, kid := range n.kids {
		rules = t.collapse(kid, rules)
	}
	return rules
}

// size returns the number of rules in the tree: the rules of its keys and the jumps between
// its chains.
func (t *tree) size() int { return t.first.count + t.ahead + t.below }

// walk calls f with every chain at and below n, after all chains that it leads to.
func (n *node) walk(f func(*node)) {
	if n.kids != nil {
		for _, kid := range n.kids {
			if kid != nil {
				kid.walk(f)
			}
		}
	}
	f(n)
}

// name returns the name of a chain, at most the 28 bytes that the kernel allows
// (XT_EXTENSION_MAXNAMELEN, less the NUL). For IPv4 it has the range of addresses in
// hexadecimal, for NodePorts the protocol and range of ports.
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

// rules returns the tree's rules in a chain.
func (t *tree) rules(n *node) []string {
	var out []string
	for _, d := range n.rules {
		out = d.appendTo(out)
	}
	if n.kids == nil {
		return out
	}
	// After a goto, a packet that matches nothing returns to the first chain immediately.
	how := "-g "
	if n == t.first {
		how = "-j "
	}
	for _, kid := range n.kids {
		if kid != nil {
			out = append(out, t.match(kid)+" "+how+t.name(kid))
		}
	}
	return out
}

// match returns the match of the packets for a chain.
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
