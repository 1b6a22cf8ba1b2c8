//go:build linux

package iptables

import (
	"encoding/binary"
	"encoding/hex"
	"math/bits"
	"net/netip"
	"slices"
	"strconv"
	"strings"

	v1 "k8s.io/api/core/v1"
)

// A dispatcher leads a packet to the one rule, of very many, that is for its
// destination. It is a tree of chains: a chain of few rules holds them itself, one
// of more divides them by the first two bits in which they differ, of destination
// address, protocol and port, in this order. So a packet meets a few rules on each
// of the O(log N) chains on its way, and one rule more or less is a change to one
// small chain.
//
// What the tree looks like depends on nothing but the rules in it: it is the same
// however it came about.
type dispatcher struct {
	table table
	// root is the name of the first chain; prefix begins those of all others.
	root, prefix string
}

// The dispatchers: places in [dispatchers] and model.trees.
const (
	toServices = iota
	toNodePorts
	refusedServices
	refusedExternal
	refusedNodePorts
	healthNodePorts
	firewalled
	clusterIPs
)

var dispatchers = [...]dispatcher{
	toServices:       {nat, chainServices, "KUBE-SVCS-"},
	toNodePorts:      {nat, chainNodePorts, "KUBE-NPS-"},
	refusedServices:  {filter, chainServices, "KUBE-SVCS-"},
	refusedExternal:  {filter, chainExternalServices, "KUBE-EXTS-"},
	refusedNodePorts: {filter, chainRefusedNodePorts, "KUBE-RNPS-"},
	healthNodePorts:  {filter, chainNodePorts, "KUBE-HCNPS-"},
	firewalled:       {filter, chainFirewall, "KUBE-FWS-"},
	clusterIPs:       {filter, chainClusterIPs, "KUBE-CIPS-"},
}

// key is what a dispatched rule matches: the bytes of the address, unless it is
// of a tree of NodePorts; one for the protocol and two for the port, unless it is
// of the tree of cluster IPs. All keys of a tree are equally long, and none is a
// prefix of another.
type key string

// maxKeyBits is the length of the longest key.
const maxKeyBits = 128 + 8 + 16

// stride is by how many bits a chain divides its rules.
const stride = 2

// leafRules is how many rules a chain below the first holds undivided; firstRules
// is the same for the first, so that small clusters have the single chain that
// operators know.
const (
	leafRules  = 12
	firstRules = 100
)

// protocols is the protocols in the order of their two bits in a key.
var protocols = [...]v1.Protocol{v1.ProtocolTCP, v1.ProtocolUDP, v1.ProtocolSCTP}

// keyOf returns the key of an address (none if it is the zero Addr), protocol
// and port.
func keyOf(a netip.Addr, p v1.Protocol, port uint16) key {
	b := binary.BigEndian.AppendUint16(append(a.AsSlice(), byte(slices.Index(protocols[:], p))<<6), port)
	return key(b)
}

// keyOfAddr returns the key of an address alone.
func keyOfAddr(a netip.Addr) key { return key(a.AsSlice()) }

// bitsAt returns the bits at which a chain divides its rules: two of them.
func (k key) bitsAt(i int) int { return int(k[i/8]>>(8-stride-i%8)) & (1<<stride - 1) }

// common returns how many bits, rounded down to the stride, k and o begin with
// alike.
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

// prefix returns k with only its first n bits left.
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

// dispatched is a rule and what it matches.
type dispatched struct {
	key  key
	rule string
	// before, unless it is "", is a rule ahead of it that matches some of the same
	// packets. It does not count where rules are divided among chains.
	before string
}

// isAhead returns how many rules are ahead of this one.
func (d dispatched) isAhead() int {
	if d.before == "" {
		return 0
	}
	return 1
}

// node is one chain of a tree. It holds rules, or leads to at least two others.
type node struct {
	// slot is the first bits of every key at or below it, as many as the chain that
	// leads here asks for. They make its name. sample begins like every key at or
	// below it for at bits at least.
	slot   int
	sample key
	rules  []dispatched // sorted; nil if it leads to others
	at     int          // the bits by which it divides
	kids   *[1 << stride]*node
	count  int // rules at or below it
}

// tree is what one dispatcher consists of.
type tree struct {
	dispatcher
	addrBits int // of the address in a key
	first    *node
	// below is how many chains there are below the first. One rule leads to each.
	below int
	// ahead is how many rules there are ahead of others.
	ahead int
	// changed is the chains that are not as they were when it was last emptied, by
	// name; nil stands for one that is gone.
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

// gone takes note that a chain below the first is no more.
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
				t.ahead += d.isAhead() - n.rules[i].isAhead()
				n.rules[i] = d
				t.touch(n)
			}
			return false
		}
		t.ahead += d.isAhead()
		n.rules = slices.Insert(n.rules, i, d)
		n.count++
		n.sample = d.key
		t.touch(n)
		t.divide(n)
		return true
	}
	if at := n.sample.common(d.key); at < n.at {
		// It differs from all others before they differ among themselves.
		others := &node{slot: at + stride, sample: n.sample, at: n.at, kids: n.kids, count: n.count}
		n.at, n.kids = at, new([1 << stride]*node)
		n.kids[others.sample.bitsAt(at)] = others
		t.below++
		t.touch(others)
		t.touch(n)
	}
	i := d.key.bitsAt(n.at)
	if n.kids[i] == nil {
		n.kids[i] = &node{slot: n.at + stride}
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

// divide divides the rules of a chain that has too many.
func (t *tree) divide(n *node) {
	if len(n.rules) <= t.limit(n) {
		return
	}
	rules := n.rules
	n.at, n.kids, n.rules = rules[0].key.common(rules[len(rules)-1].key), new([1 << stride]*node), nil
	for i := range n.kids {
		end := 0
		for end < len(rules) && rules[end].key.bitsAt(n.at) == i {
			end++
		}
		if end != 0 {
			kid := &node{slot: n.at + stride, sample: rules[0].key, rules: slices.Clone(rules[:end]), count: end}
			n.kids[i] = kid
			t.below++
			t.touch(kid)
			t.divide(kid)
		}
		rules = rules[end:]
	}
	t.touch(n)
}

// remove removes a rule, if it is there: another rule with the same key stays.
func (t *tree) remove(d dispatched) { t.delete(t.first, d) }

func (t *tree) delete(n *node, d dispatched) (deleted bool) {
	if n.kids == nil {
		i := slices.Index(n.rules, d)
		if i < 0 {
			return false
		}
		n.rules = slices.Delete(n.rules, i, i+1)
		n.count--
		t.ahead -= d.isAhead()
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
	// Too many for one chain, so the only one left is divided itself.
	t.gone(last)
	n.sample, n.at, n.kids = last.sample, last.at, last.kids
	t.touch(n)
	return true
}

// collapse takes the chains at and below n away and appends their rules.
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

// size returns how many rules the tree's chains have because of it.
func (t *tree) size() int { return t.first.count + t.ahead + t.below }

// walk calls f with every chain, none before one it leads to.
func (t *tree) walk(f func(*node)) { walk(t.first, f) }

func walk(n *node, f func(*node)) {
	if n.kids != nil {
		for _, kid := range n.kids {
			if kid != nil {
				walk(kid, f)
			}
		}
	}
	f(n)
}

// name returns the name of a chain: at most 28 bytes, as many as the kernel
// allows (XT_EXTENSION_MAXNAMELEN, less the NUL). For IPv4 it is the range of
// addresses in hexadecimal, for NodePorts protocol and range of ports.
func (t *tree) name(n *node) string {
	if n.slot == 0 {
		return t.root
	}
	slot := n.sample.prefix(n.slot)
	switch {
	case t.addrBits == 32 && n.slot <= 32:
		return t.prefix + strings.ToUpper(hex.EncodeToString([]byte(slot[:4]))) + "/" + strconv.Itoa(n.slot)
	case t.addrBits == 0:
		p := string(protocols[slot[0]>>6])
		if n.slot <= 8 {
			return t.prefix + p
		}
		return t.prefix + p + "-" + strings.ToUpper(hex.EncodeToString([]byte(slot[1:]))) + "/" + strconv.Itoa(n.slot-8)
	}
	return t.prefix + hashOf(string(slot), strconv.Itoa(n.slot))
}

// rules returns the rules that are in a chain because of the tree.
func (t *tree) rules(n *node) []string {
	var out []string
	for _, d := range n.rules {
		if d.before != "" {
			out = append(out, d.before)
		}
		out = append(out, d.rule)
	}
	if n.kids == nil {
		return out
	}
	// A packet that finds nothing comes back to the first chain at once.
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

// match returns what the packets for a chain have in common.
func (t *tree) match(n *node) string {
	slot, size := n.sample.prefix(n.slot), t.addrBits/8
	var out []string
	if size != 0 {
		a, _ := netip.AddrFromSlice([]byte(slot[:size]))
		out = append(out, destination(netip.PrefixFrom(a, min(n.slot, t.addrBits))))
	}
	if n.slot > t.addrBits {
		p := protocolName(protocols[slot[size]>>6])
		out = append(out, "-p "+p)
		if free := t.addrBits + 24 - n.slot; free < 16 {
			from := binary.BigEndian.Uint16([]byte(slot[size+1:]))
			match := destinationPort(p, from)
			if free != 0 {
				match += ":" + strconv.Itoa(int(from)|(1<<free-1))
			}
			out = append(out, match)
		}
	}
	return join(out...)
}
