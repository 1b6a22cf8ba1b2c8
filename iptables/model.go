package iptables

import (
	"fmt"
	"slices"
	"strconv"

	"github.com/go-proxier/proxier/internal/inet"
	"github.com/go-proxier/proxier/internal/iptext"
	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/tracker"
)

// settings holds the inputs of rules besides the ruleset.
type settings struct {
	family tracker.Family
	mark   uint32
	// localhost makes NodePorts answer at loopback addresses, too.
	localhost bool
	// guarded makes the guard of the loopback range exist. setsBack makes it record that route_localnet was 0 before.
	guarded, setsBack bool
	// noSCTP and noAffinity report that the system lacks the matches of SCTP ports and of client affinity.
	noSCTP, noAffinity bool
	// acceptInvalid accepts packets that connection tracking considers invalid.
	acceptInvalid bool
	// counters lists the accounting objects that rules count into.
	counters []string
}

// model is everything that one family's tables should hold, but not the text of the Services' own chains: a Service's
// old chains are rendered again when it changes.
type model struct {
	*settings
	node     *ruleset.Node
	services map[tracker.Key]*ruleset.Port
	pods     []string // the matches that recognize pods
	trees    [len(dispatchers)]*tree
	// moved reports that untranslated has changed since takeChanged.
	moved bool
	// own counts the rules of the Services' own chains, by table.
	own [tables]int
	// shared holds the rules of Service ports for keys that several Services may have, in order. The first of a key
	// is in effect.
	shared map[sharedKey][]string
}

type sharedKey struct {
	dispatcher int
	key        key
}

func newModel(s *settings, node *ruleset.Node) (*model, error) {
	m := &model{settings: s, node: node, services: map[tracker.Key]*ruleset.Port{}, shared: map[sharedKey][]string{}}
	var err error
	if m.pods, err = iptext.PodMatches(node.LocalTraffic, s.family); err != nil {
		return nil, fmt.Errorf("iptables: %w", err)
	}
	for i, d := range dispatchers {
		addrBits := s.family.Bits()
		if i == toNodePorts || i == refusedNodePorts || i == healthNodePorts {
			addrBits = 0
		}
		m.trees[i] = newTree(d, addrBits)
	}
	return m, nil
}

func sameRules(a, b *ruleset.Node) bool {
	return a == b || a.LocalTraffic.Bridge == b.LocalTraffic.Bridge && a.LocalTraffic.InterfacePrefix == b.LocalTraffic.InterfacePrefix &&
		slices.Equal(a.LocalTraffic.CIDRs, b.LocalTraffic.CIDRs)
}

// setNode replaces the node. The new one must satisfy sameRules.
func (m *model) setNode(n *ruleset.Node) {
	old := *m
	m.node = n
	m.moved = m.moved || !slices.Equal(old.untranslated().rules, m.untranslated().rules)
	for i, t := range m.trees {
		if !slices.Equal(old.before(i), m.before(i)) || !slices.Equal(old.after(i), m.after(i)) {
			t.touch(t.first)
		}
	}
}

// render returns the chains and rules of a Service, and the zero value for nil.
func (m *model) render(s *ruleset.Port) rendered {
	if s == nil {
		return rendered{}
	}
	return renderService(m.settings, m.pods, s)
}

// change makes new, which may be nil, the version of the Service port k. Unless emit is nil, change calls it with the
// Service's chains of both versions. It marks the chains of dispatchers as changed.
func (m *model) change(k tracker.Key, new *ruleset.Port, emit func(before, now []chain)) {
	before, now := m.render(m.services[k]), m.render(new)
	if m.services[k] = new; new == nil {
		delete(m.services, k)
	}
	for _, p := range now.rules {
		if p.shared {
			m.share(p)
		}
	}
	for _, p := range before.rules {
		if p.shared {
			m.unshare(p)
		} else if !slices.ContainsFunc(now.rules, func(q placed) bool { return q.dispatcher == p.dispatcher && q.key == p.key }) {
			// If another Service has this frontend by now, its rule stays.
			m.trees[p.dispatcher].remove(p.dispatched)
		}
	}
	for _, p := range now.rules {
		if !p.shared {
			m.trees[p.dispatcher].put(p.dispatched)
		}
	}
	for _, c := range before.chains {
		m.own[c.table] -= len(c.rules)
	}
	for _, c := range now.chains {
		m.own[c.table] += len(c.rules)
	}
	if emit != nil {
		emit(before.chains, now.chains)
	}
}

// share adds a rule for a key that several Services may have.
func (m *model) share(p placed) {
	k := sharedKey{p.dispatcher, p.key}
	rules := m.shared[k]
	i, found := slices.BinarySearch(rules, p.rule)
	if found {
		p.rule = rules[i] // store the text once
	}
	m.shared[k] = slices.Insert(rules, i, p.rule)
	m.trees[p.dispatcher].put(dispatched{key: p.key, rule: m.shared[k][0]})
}

// unshare removes a rule that share added.
func (m *model) unshare(p placed) {
	k := sharedKey{p.dispatcher, p.key}
	rules, t := m.shared[k], m.trees[p.dispatcher]
	i, found := slices.BinarySearch(rules, p.rule)
	if !found {
		return
	}
	if first := rules[0]; len(rules) == 1 {
		delete(m.shared, k)
		t.remove(dispatched{key: p.key, rule: first})
		return
	}
	m.shared[k] = slices.Delete(rules, i, i+1)
	t.put(dispatched{key: p.key, rule: m.shared[k][0]})
}

// size returns how many rules our chains have in each table.
func (m *model) size() (n [tables]int) {
	n = m.own
	for _, c := range m.fixed() {
		n[c.table] += len(c.rules)
	}
	for i, t := range m.trees {
		n[t.table] += t.size() + len(m.before(i)) + len(m.after(i))
	}
	return n
}

// forgetChanged marks the chains of dispatchers as unchanged.
func (m *model) forgetChanged() {
	m.moved = false
	for _, t := range m.trees {
		t.changed = map[string]*node{}
	}
}

// takeChanged moves the chains of dispatchers that changed, and untranslated, to b.
func (m *model) takeChanged(b *batch) {
	if m.moved {
		b.put(m.untranslated())
		m.moved = false
	}
	for i, t := range m.trees {
		for name, n := range t.changed {
			if n == nil {
				b.drop(t.table, name)
			} else {
				b.put(m.dispatcherChain(i, n))
			}
		}
		t.changed = map[string]*node{}
	}
}

func (m *model) dispatcherChain(i int, n *node) chain {
	t := m.trees[i]
	if n != t.first {
		return chain{t.table, t.name(n), t.rules(n), rankFirst - 1 - n.prefixLen}
	}
	rank := rankFirst
	if m.after(i) != nil {
		rank = rankTop
	}
	return chain{t.table, t.root, slices.Concat(m.before(i), t.rules(n), m.after(i)), rank}
}

// before returns the rules at the beginning of a dispatcher's first chain.
func (m *model) before(dispatcher int) []string {
	switch dispatcher {
	case refusedAddresses, firewalled:
		return []string{passTranslated}
	}
	return nil
}

// after returns the rules at the end of a dispatcher's first chain.
func (m *model) after(dispatcher int) []string {
	switch dispatcher {
	case toServices:
		return m.nodePorts("kubernetes service nodeports; NOTE: this must be the last rule in this chain", chainNodePorts)
	case refusedAddresses:
		return m.nodePorts("kubernetes service nodeports", chainRefusedNodePorts)
	}
	return nil
}

// passTranslated lets translated packets pass, even if the endpoint's address and port are a frontend, too.
const passTranslated = "-m conntrack --ctstate DNAT -j RETURN"

// untranslated returns the chain that packets of OUTPUT and FORWARD meet.
//
// An address of the node is a host even if it is a cluster IP. Packets from the node to its own addresses meet
// KUBE-EXTERNAL-SERVICES in INPUT, where refusing them gives the socket a better error than EPERM. The jump to
// KUBE-EXTERNAL-SERVICES here is for OUTPUT: one in the kernel's own chain would keep kube-proxy from deleting
// KUBE-EXTERNAL-SERVICES.
func (m *model) untranslated() chain {
	c := chain{filter, chainServices, []string{
		passTranslated,
		iptext.Join(iptext.Comment("addresses of the node"), "-m addrtype --dst-type LOCAL -j RETURN"),
		iptext.Join(iptext.Comment("kubernetes externally-visible service portals"), iptext.Jump(chainExternalServices)),
		iptext.Jump(chainClusterIPs),
	}, rankTop}
	for _, p := range inet.Prefixes(m.node.ServiceCIDRs, m.family) {
		c.rules = append(c.rules, iptext.Join(iptext.Destination(p), iptext.Comment("no such cluster IP"), "-j DROP"))
	}
	return c
}

// nodePorts returns the rules that lead packets for the addresses at which NodePorts
// answer to a chain.
func (m *model) nodePorts(about, chain string) []string {
	own := []string{iptext.Comment(about), "-m addrtype --dst-type LOCAL", iptext.Jump(chain)}
	to := func(match string) string { return iptext.Join(append([]string{match}, own...)...) }
	lo := iptext.Loopback(m.family)
	ports := m.node.NodePorts(m.family)
	var out []string
	if m.localhost {
		// Packets of other hosts stay untranslated, and meet the guard.
		out = append(out, iptext.Destination(lo)+" -m addrtype ! --src-type LOCAL -j RETURN")
	}
	switch {
	case ports.All && m.localhost:
		return append(out, to(""))
	case ports.All:
		return []string{to("! " + iptext.Destination(lo))}
	}
	if m.localhost {
		out = append(out, to(iptext.Destination(lo)))
	} else if slices.ContainsFunc(ports.Prefixes, lo.Overlaps) {
		out = append(out, iptext.Destination(lo)+" -j RETURN")
	}
	for _, p := range inet.Prefixes(ports.Prefixes, m.family) {
		out = append(out, to(iptext.Destination(p)))
	}
	return out
}

// fixed returns the chains that are neither a Service's nor a dispatcher's.
func (m *model) fixed() []chain {
	mark := fmt.Sprintf("0x%x/0x%x", m.mark, m.mark)
	setMark := "-j MARK --set-xmark " + mark
	out := []chain{{nat, chainMarkMasq, []string{setMark}, rankMark}}
	if len(m.pods) > 1 {
		c := chain{nat, chainMarkNotPods, nil, rankMark}
		for _, match := range m.pods {
			c.rules = append(c.rules, iptext.Join(match, "-j RETURN"))
		}
		c.rules = append(c.rules, setMark)
		out = append(out, c)
	}
	forward := chain{filter, chainForward, nil, rankTop}
	if !m.acceptInvalid {
		count := ""
		if slices.Contains(m.counters, InvalidDropped) {
			count = counted(InvalidDropped)
		}
		forward.rules = append(forward.rules, iptext.Join("-m conntrack --ctstate INVALID", count, "-j DROP"))
	}
	forward.rules = append(forward.rules,
		iptext.Comment("kubernetes forwarding rules")+" -m mark --mark "+mark+" -j ACCEPT",
		iptext.Comment("kubernetes forwarding conntrack rule")+" -m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT")
	out = append(out, m.untranslated(),
		chain{nat, chainPostrouting, []string{
			"-m mark ! --mark " + mark + " -j RETURN",
			fmt.Sprintf("-j MARK --set-xmark 0x%x/0x0", m.mark),
			iptext.Comment("kubernetes service traffic requiring SNAT") + " -j MASQUERADE --random-fully",
		}, rankTop},
		forward)
	if m.guarded {
		out = append(out, m.guardChain())
	}
	return out
}

// hook is a rule in one of the kernel's own chains that leads to one of ours.
type hook struct {
	table table
	chain string
	rule  string
}

func (h hook) sameRule(o hook) bool { return h.table == o.table && h.rule == o.rule }

// hooks returns the rules that must be at the beginning of the kernel's own chains, in this order.
func (m *model) hooks() []hook {
	isNew := "-m conntrack --ctstate NEW"
	var out []hook
	add := func(t table, rule string, chains ...string) {
		for _, c := range chains {
			out = append(out, hook{t, c, rule})
		}
	}
	add(filter, iptext.Join(isNew, iptext.Comment("kubernetes externally-visible service portals"), iptext.Jump(chainExternalServices)), "INPUT", "FORWARD")
	add(filter, iptext.Join(iptext.Comment("kubernetes health check service ports"), iptext.Jump(chainNodePorts)), "INPUT")
	add(filter, iptext.Join(isNew, iptext.Comment("kubernetes service portals"), iptext.Jump(chainServices)), "FORWARD", "OUTPUT")
	add(filter, iptext.Join(iptext.Comment("kubernetes forwarding rules"), iptext.Jump(chainForward)), "FORWARD")
	add(filter, iptext.Join(isNew, iptext.Comment("kubernetes load balancer firewall"), iptext.Jump(chainFirewall)), "INPUT", "OUTPUT", "FORWARD")
	add(nat, iptext.Join(iptext.Comment("kubernetes service portals"), iptext.Jump(chainServices)), "OUTPUT", "PREROUTING")
	add(nat, iptext.Join(iptext.Comment("kubernetes postrouting rules"), iptext.Jump(chainPostrouting)), "POSTROUTING")
	if m.guarded {
		out = append(out, guardHooks()...)
	}
	return out
}

// allChains calls f with every chain except the Services' own chains.
func (m *model) allChains(f func(chain)) {
	for _, c := range m.fixed() {
		f(c)
	}
	for i, t := range m.trees {
		t.first.walk(func(n *node) { f(m.dispatcherChain(i, n)) })
	}
}

// The sysctl route_localnet, which NodePorts at loopback addresses need, lets neighbors send to servers of the node
// that listen at loopback addresses only (CVE-2020-8558). The guard is the chain KUBE-PROXY-LOCALNET and the jumps to
// it from INPUT and OUTPUT, which drop such packets. It is in effect before this package sets the sysctl, and for as
// long as any program has it set.
//
// A rule of the guard without a target, guardMark, records that the sysctl was 0 before. Only then does this package
// set it back, even in another process.

var guardMark = iptext.Comment("route_localnet was 0 before")

func (s *settings) guardChain() chain {
	lo := iptext.Loopback(s.family)
	c := chain{filter, chainLocalnet, []string{
		iptext.Join("! "+iptext.Source(lo), iptext.Destination(lo), iptext.Comment("block incoming localnet connections"), "-m conntrack ! --ctstate RELATED,ESTABLISHED,DNAT", "-j DROP"),
	}, rankTop}
	if s.setsBack {
		c.rules = append(c.rules, guardMark)
	}
	return c
}

func guardHooks() []hook {
	return []hook{{filter, "INPUT", iptext.Jump(chainLocalnet)}, {filter, "OUTPUT", iptext.Jump(chainLocalnet)}}
}

// table is one of the kernel's tables.
type table uint8

const (
	filter table = iota
	nat
	tables // how many there are
)

func (t table) String() string {
	return [...]string{"filter", "nat"}[t]
}

// chain is a chain and all of its rules, each as iptables-save prints it, without "-A NAME ".
type chain struct {
	table table
	name  string
	rules []string
	// rank orders chains: a chain comes after the chains that it jumps to.
	rank int
}

// The ranks of chains: see chain.rank. Groups of endpoints come before rankService, the deepest first; the chains of
// a dispatcher after rankDispatch, likewise.
const (
	rankMark = iota
	rankEndpoint
	rankGroup    // to rankGroup + maxGroupDepth
	rankService  = rankGroup + maxGroupDepth + 1
	rankExternal = rankService + 1
	rankSources  = rankExternal + 1
	rankFirewall = rankSources + 1
	rankDispatch = rankFirewall + 1 // to rankDispatch + maxKeyBits
	rankFirst    = rankDispatch + maxKeyBits + 1
	rankTop      = rankFirst + 1
	rankCanary   = rankTop + 1
)

// probability returns the match of a share of new connections, part of whole. The kernel
// counts in parts of 1<<31 (xt_statistic), so the share is rounded.
func probability(part, whole int) string {
	n := (uint64(part)<<31 + uint64(whole)/2) / uint64(whole)
	return "-m statistic --mode random --probability " + strconv.FormatFloat(float64(n)/(1<<31), 'f', 11, 64)
}
