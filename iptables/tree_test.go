package iptables

import (
	"encoding/binary"
	"fmt"
	"maps"
	"math/rand/v2"
	"net/netip"
	"slices"
	"strings"
	"testing"

	v1 "k8s.io/api/core/v1"
)

// chains returns the tree as chains, by name.
func (t *tree) chains() map[string][]string {
	out := map[string][]string{}
	t.first.walk(func(n *node) { out[t.name(n)] = t.rules(n) })
	return out
}

// slowTree builds the same tree from all of its rules together.
func slowTree(t *tree, rules []dispatched) map[string][]string {
	out := map[string][]string{}
	var build func(n *node, rules []dispatched, limit int)
	build = func(n *node, rules []dispatched, limit int) {
		if n.count = len(rules); len(rules) <= limit {
			n.rules = rules
			return
		}
		at := 0
		for alike := true; alike; {
			for _, r := range rules {
				alike = alike && r.key.bitsAt(at) == rules[0].key.bitsAt(at)
			}
			if alike {
				at += stride
			}
		}
		n.at, n.kids = at, new([1 << stride]*node)
		for _, r := range rules {
			i := r.key.bitsAt(at)
			if n.kids[i] == nil {
				n.kids[i] = &node{prefixLen: at + stride, sample: r.key}
			}
		}
		for i, kid := range n.kids {
			if kid != nil {
				var part []dispatched
				for _, r := range rules {
					if r.key.bitsAt(at) == i {
						part = append(part, r)
					}
				}
				build(kid, part, leafRules)
			}
		}
	}
	rules = slices.Clone(rules)
	slices.SortFunc(rules, func(a, b dispatched) int { return strings.Compare(string(a.key), string(b.key)) })
	first := &node{}
	save := t.first
	t.first = first // the first chain jumps, others go to
	build(first, rules, firstRules)
	var show func(n *node)
	show = func(n *node) {
		out[t.name(n)] = t.rules(n)
		n.next(show)
	}
	show(first)
	t.first = save
	return out
}

func randomKey(rng *rand.Rand, addrBits int) key {
	var a netip.Addr
	switch addrBits {
	case 32:
		a = netip.AddrFrom4([4]byte{10, 96, byte(rng.IntN(3)), byte(rng.IntN(256))})
		if rng.IntN(20) == 0 {
			a = netip.AddrFrom4([4]byte{203, 0, 113, byte(rng.IntN(4))})
		}
		if rng.IntN(3) == 0 {
			a = netip.AddrFrom4([4]byte{198, 51, 100, 7}) // many ports at one address
		}
	case 128:
		b := netip.MustParseAddr("fd00:10:96::").As16()
		b[14], b[15] = byte(rng.IntN(3)), byte(rng.IntN(256))
		a = netip.AddrFrom16(b)
	}
	return keyOf(a, protocols[rng.IntN(3)], uint16(rng.IntN(1<<16)>>rng.IntN(16)))
}

func TestTreeDependsOnlyOnItsRules(t *testing.T) {
	t.Parallel()
	for _, addrBits := range []int{0, 32, 128} {
		t.Run(fmt.Sprint(addrBits), func(t *testing.T) {
			t.Parallel()
			rng := rand.New(rand.NewPCG(1, uint64(addrBits)))
			tr := newTree(dispatchers[toServices], addrBits)
			tr.changed = map[string]*node{tr.root: tr.first}
			shown := map[string][]string{}
			have := map[key]dispatched{}
			for step := range 6000 {
				grow := step/1500%2 == 0
				var k key
				if keys := slices.Sorted(maps.Keys(have)); len(keys) != 0 && (rng.IntN(10) < 2 == grow) {
					k = keys[rng.IntN(len(keys))]
				} else {
					k = randomKey(rng, addrBits)
				}
				if _, ok := have[k]; ok && rng.IntN(3) != 0 {
					tr.remove(dispatched{key: k, rule: "-j ANOTHER"})
					tr.remove(have[k])
					delete(have, k)
				} else {
					d := dispatched{key: k, rule: fmt.Sprint("-j RULE", rng.IntN(3), " ", []byte(k))}
					if rng.IntN(3) == 0 {
						d.before = "-j FIRST"
					}
					have[k] = d
					tr.put(d)
				}
				// Dividing or joining chains changes at most twice as many chains as they have rules.
				most := 2 * (leafRules + 2)
				if len(have) >= firstRules && len(have) <= firstRules+1 {
					most = 2 * (firstRules + 1)
				}
				if len(tr.changed) > most {
					t.Fatalf("step %d: one rule of %d changed %d chains", step, len(have), len(tr.changed))
				}
				for name, n := range tr.changed {
					if n == nil {
						delete(shown, name)
					} else {
						shown[name] = tr.rules(n)
					}
				}
				clear(tr.changed)
				if step%50 != 0 {
					continue
				}
				var rules []dispatched
				for _, d := range have {
					rules = append(rules, d)
				}
				want := slowTree(tr, rules)
				if got := tr.chains(); !maps.EqualFunc(got, want, slices.Equal) {
					t.Fatalf("step %d, %d rules:\n%v\nwant\n%v", step, len(have), got, want)
				}
				rulesInAll := 0
				for _, rules := range want {
					rulesInAll += len(rules)
				}
				if tr.size() != rulesInAll {
					t.Fatalf("step %d: size returns %d of %d rules", step, tr.size(), rulesInAll)
				}
				if !maps.EqualFunc(shown, want, slices.Equal) {
					t.Fatalf("step %d: the reported changes give other chains than the tree has: %d, want %d", step, len(shown), len(want))
				}
			}
		})
	}
}

// TestTreeLeadsToTheRule follows packets through the tree.
func TestTreeLeadsToTheRule(t *testing.T) {
	t.Parallel()
	rng := rand.New(rand.NewPCG(3, 3))
	tr := newTree(dispatchers[toServices], 32)
	for i := range 20000 {
		tr.put(dispatched{key: keyOf(netip.AddrFrom4([4]byte{10, 96, byte(i >> 8), byte(i)}), v1.ProtocolTCP, 80), rule: fmt.Sprint(i)})
	}
	most := 0
	for range 1000 {
		i := rng.IntN(20000)
		k := keyOf(netip.AddrFrom4([4]byte{10, 96, byte(i >> 8), byte(i)}), v1.ProtocolTCP, 80)
		n, met := tr.first, 0
		for n.kids != nil {
			var to *node
			n.next(func(kid *node) {
				if to == nil {
					met++
				}
				if k.prefix(kid.prefixLen) == kid.sample.prefix(kid.prefixLen) {
					if to != nil {
						t.Fatal("two chains match a packet")
					}
					to = kid
				}
			})
			n = to
		}
		found := false
		for _, r := range n.rules {
			met++
			if found = r.key == k; found {
				break
			}
		}
		if !found {
			t.Fatalf("rule %d is not in the chain to which its packet is led", i)
		}
		most = max(most, met)
	}
	if most > 60 {
		t.Errorf("a packet met %d rules of 20,000", most)
	}
}

func TestTreeNamesAndMatches(t *testing.T) {
	t.Parallel()
	a4, a6 := netip.MustParseAddr("10.96.5.9"), netip.MustParseAddr("fd00:10:96::509")
	for _, c := range []struct {
		addr        netip.Addr
		d           int
		prefixLen   int
		name, match string
	}{
		{a4, toServices, 0, "KUBE-SERVICES", "-d 0.0.0.0/0"},
		{a4, toServices, 22, "KUBE-SVC-IP-0A600400/22", "-d 10.96.4.0/22"},
		{a4, toServices, 32, "KUBE-SVC-IP-0A600509/32", "-d 10.96.5.9/32"},
		{a4, refusedAddresses, 34, "", "-d 10.96.5.9/32 -p udp"},
		{a4, toServices, 42, "", "-d 10.96.5.9/32 -p udp -m udp --dport 0:16383"},
		{a4, toServices, 56, "", "-d 10.96.5.9/32 -p udp -m udp --dport 53"},
		{a6, toServices, 118, "", "-d fd00:10:96::400/118"},
		{a6, toServices, 136, "", "-d fd00:10:96::509/128 -p udp"},
		{netip.Addr{}, toNodePorts, 2, "KUBE-EXT-NP-UDP", "-p udp"},
		{netip.Addr{}, toNodePorts, 18, "KUBE-EXT-NP-UDP-0000/10", "-p udp -m udp --dport 0:63"},
	} {
		tr := newTree(dispatchers[c.d], c.addr.BitLen())
		n := &node{prefixLen: c.prefixLen, sample: keyOf(c.addr, v1.ProtocolUDP, 53)}
		name := tr.name(n)
		if c.name != "" && name != c.name || len(name) > 28 {
			t.Errorf("%v/%d: name %q, want %q", c.addr, c.prefixLen, name, c.name)
		}
		if got := tr.match(n); got != c.match {
			t.Errorf("%v/%d: match %q, want %q", c.addr, c.prefixLen, got, c.match)
		}
	}
}

// TestKeysDoNotDeepenTree adds keys that differ from one in each of its bits, from which every division takes few.
func TestKeysDoNotDeepenTree(t *testing.T) {
	t.Parallel()
	for _, addrBits := range []int{0, 32, 128} {
		tr := newTree(dispatchers[toServices], addrBits)
		base := slices.Repeat([]byte{0x14}, (addrBits+24)/8)
		for i := range base {
			for bits := range 256 {
				k := slices.Clone(base)
				if k[i] = byte(bits); k[addrBits/8]>>6 < 3 {
					tr.put(dispatched{key: key(k)})
				}
			}
		}
		var depth func(n *node) int
		depth = func(n *node) (most int) {
			n.next(func(kid *node) { most = max(most, 1+depth(kid)) })
			return most
		}
		if d := depth(tr.first); d > 4 {
			t.Errorf("%d keys of %d bits: chains are %d deep", tr.first.count, len(base)*8, d)
		}
		tr.first.walk(func(n *node) {
			if rules := len(tr.rules(n)); rules > 300 {
				t.Errorf("%d keys of %d bits: a chain has %d rules", tr.first.count, len(base)*8, rules)
			}
		})
	}
}

// TestWidestChain has 8 long branches. Each has 1,800 keys at its end and, on the way there, keys that leave it at each
// bit. A rule of such a chain takes up to 480 bytes in a message of nf_tables: see "Requirements" in the documentation.
func TestWidestChain(t *testing.T) {
	t.Parallel()
	for addrBits, most := range map[int]int{32: 450, 128: 1600} {
		tr := newTree(dispatchers[toServices], addrBits)
		size := (addrBits + 24) / 8
		for branch := range 8 {
			put := func(i int, bits byte, last uint16) {
				k := make([]byte, size)
				k[0] = byte(branch << 4)
				binary.BigEndian.PutUint16(k[size-2:], last)
				if k[i] |= bits; i != addrBits/8 || bits>>6 < 3 && bits<<2 == 0 {
					tr.put(dispatched{key: key(k)})
				}
			}
			for i := range uint16(1800) {
				put(0, 0, i)
			}
			for bit := 4; bit < size*8-12; bit += stride {
				for v := range byte(1 << stride) {
					put(bit/8, v<<(8-stride-bit%8), 0)
				}
			}
		}
		widest := 0
		tr.first.walk(func(n *node) { widest = max(widest, len(tr.rules(n))) })
		if widest > most || widest < most/2 {
			t.Errorf("%d keys with addresses of %d bits: a chain has %d rules, want about %d", tr.first.count, addrBits, widest, most)
		}
	}
}
