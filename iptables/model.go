//go:build linux

package iptables

import (
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/go-proxier/proxier/internal/inet"
	"github.com/go-proxier/proxier/internal/iptool"
	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/tracker"
)

// settings holds the inputs of rules besides the ruleset.
type settings struct {
	family tracker.Family
	mark   uint32
	// localhost makes NodePorts answer at loopback addresses, too.
	localhost bool
	// guarded makes the guard of the loopback range exist. setsBack makes it record that
	// route_localnet was 0 before.
	guarded, setsBack bool
	// acceptInvalid accepts packets that connection tracking considers invalid.
	acceptInvalid bool
	// counters lists the accounting objects that rules count into.
	counters         []string
	endpointComments bool
	// refuseHash rejects Services whose endpoints must follow from a hash.
	refuseHash bool
}

// model is everything that one family's tables should hold. It does not store the text of
// the Services' own chains. When a Service changes, its old chains are rendered again.
type model struct {
	*settings
	node     *ruleset.Node
	pods     []string // the matches that recognise pods
	trees    [len(dispatchers)]*tree
	services map[uint32]*ruleset.Service
	// own counts the rules of the Services' own chains, by table.
	own [tables]int
	// shared holds the rules of Service ports for keys that several Services may have, in
	// order. The first of a key is in effect: which one that is must not depend on history.
	shared map[sharedKey][]string
}

// sharedKey is a key in the tree of a dispatcher.
type sharedKey struct {
	dispatcher int
	key        key
}

func newModel(s *settings, node *ruleset.Node) (*model, error) {
	m := &model{settings: s, node: node, services: map[uint32]*ruleset.Service{}, shared: map[sharedKey][]string{}}
	var err error
	if m.pods, err = iptool.PodMatches(node.LocalTraffic, s.family); err != nil {
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

// sameRules reports whether both nodes give Services the same rules.
func sameRules(a, b *ruleset.Node) bool {
	return a == b || a.LocalTraffic.Bridge == b.LocalTraffic.Bridge && a.LocalTraffic.InterfacePrefix == b.LocalTraffic.InterfacePrefix &&
		slices.Equal(a.LocalTraffic.CIDRs, b.LocalTraffic.CIDRs)
}

// setNode replaces the node. The new one must satisfy sameRules.
func (m *model) setNode(n *ruleset.Node) {
	old := *m
	m.node = n
	for i, t := range m.trees {
		if !slices.Equal(old.before(i), m.before(i)) || !slices.Equal(old.after(i), m.after(i)) {
			t.touch(t.first)
		}
	}
}

// render returns the chains and rules of a Service, and the zero value for nil.
func (m *model) render(s *ruleset.Service) (rendered, error) {
	if s == nil {
		return rendered{}, nil
	}
	if strings.ContainsAny(s.Key.Name, ":/") || strings.ContainsAny(s.Key.Namespace, ":/") {
		return rendered{}, errors.New("iptables: the name or namespace is not valid in Kubernetes")
	}
	return renderService(m.settings, m.pods, s)
}

// set makes s the Service with that ID, or removes the Service if s is nil. Unless emit
// is nil, set calls it with the Service's old and new chains. It marks the chains of
// dispatchers as changed. After an error nothing has changed.
func (m *model) set(id uint32, s *ruleset.Service, emit func(before, now []chain)) error {
	now, err := m.render(s)
	if err != nil {
		return err
	}
	before, err := m.render(m.services[id])
	if err != nil {
		return fmt.Errorf("iptables: cannot render the acknowledged Service: %w", err)
	}
	// A rule that stays is added before it is removed, so that its chain does not change.
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
	if s == nil {
		delete(m.services, id)
	} else {
		m.services[id] = s
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
	return nil
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

// takeChanged moves the chains of dispatchers that changed to b.
func (m *model) takeChanged(b *batch) {
	for i, t := range m.trees {
		for name, n := range t.changed {
			if n == nil {
				b.drop(t.table, name)
			} else {
				b.put(m.dispatcherChain(i, n))
			}
		}
		clear(t.changed)
	}
}

// dispatcherChain returns one chain of a dispatcher.
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
	case refusedServices, refusedExternal, firewalled:
		// Packets that were translated to an endpoint pass, even if the endpoint's address
		// and port are a frontend, too.
		return []string{"-m conntrack --ctstate DNAT -j RETURN"}
	}
	return nil
}

// after returns the rules at the end of a dispatcher's first chain.
func (m *model) after(dispatcher int) []string {
	switch dispatcher {
	case toServices:
		return m.nodePorts("kubernetes service nodeports; NOTE: this must be the last rule in this chain", chainNodePorts)
	case refusedExternal:
		return m.nodePorts("kubernetes service nodeports", chainRefusedNodePorts)
	case refusedServices:
		// An address of the node is a host even if it is a cluster IP: its other ports answer.
		// Packets from the node to its own addresses meet KUBE-EXTERNAL-SERVICES in INPUT, where
		// refusing them gives the socket a better error than the EPERM of OUTPUT.
		//
		// The jump is for OUTPUT. kube-proxy has no such jump, and one in the kernel's own chain
		// would keep it from deleting KUBE-EXTERNAL-SERVICES.
		out := []string{
			join(comment("addresses of the node"), "-m addrtype --dst-type LOCAL -j RETURN"),
			join(comment("kubernetes externally-visible service portals"), jump(chainExternalServices)),
			jump(chainClusterIPs),
		}
		for _, c := range inet.Prefixes(m.node.ServiceCIDRs, m.family) {
			out = append(out, join(destination(c), comment("no such cluster IP"), "-j DROP"))
		}
		return out
	}
	return nil
}

// nodePorts returns the rules that lead packets for the addresses at which NodePorts
// answer to a chain.
func (m *model) nodePorts(about, chain string) []string {
	own := []string{comment(about), "-m addrtype --dst-type LOCAL", jump(chain)}
	to := func(match string) string { return join(append([]string{match}, own...)...) }
	lo := loopback(m.family)
	ports := m.node.NodePorts(m.family)
	if ports.All {
		if m.localhost {
			return []string{to("")}
		}
		return []string{to("! " + destination(lo))}
	}
	var out []string
	if m.localhost {
		out = append(out, to(destination(lo)))
	} else if slices.ContainsFunc(ports.Prefixes, lo.Overlaps) {
		out = append(out, destination(lo)+" -j RETURN")
	}
	for _, p := range inet.Prefixes(ports.Prefixes, m.family) {
		out = append(out, to(destination(p)))
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
			c.rules = append(c.rules, join(match, "-j RETURN"))
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
		forward.rules = append(forward.rules, join("-m conntrack --ctstate INVALID", count, "-j DROP"))
	}
	forward.rules = append(forward.rules,
		comment("kubernetes forwarding rules")+" -m mark --mark "+mark+" -j ACCEPT",
		comment("kubernetes forwarding conntrack rule")+" -m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT")
	out = append(out,
		chain{nat, chainPostrouting, []string{
			"-m mark ! --mark " + mark + " -j RETURN",
			fmt.Sprintf("-j MARK --set-xmark 0x%x/0x0", m.mark),
			comment("kubernetes service traffic requiring SNAT") + " -j MASQUERADE --random-fully",
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

// sameRule reports whether o is the same rule, in whichever chain.
func (h hook) sameRule(o hook) bool { return h.table == o.table && h.rule == o.rule }

// hooks returns the rules that must be in the kernel's own chains. Each is inserted at the
// beginning of its chain, in this order.
func (m *model) hooks() []hook {
	isNew := "-m conntrack --ctstate NEW"
	var out []hook
	add := func(t table, rule string, chains ...string) {
		for _, c := range chains {
			out = append(out, hook{t, c, rule})
		}
	}
	add(filter, join(isNew, comment("kubernetes externally-visible service portals"), jump(chainExternalServices)), "INPUT", "FORWARD")
	add(filter, join(comment("kubernetes health check service ports"), jump(chainNodePorts)), "INPUT")
	add(filter, join(isNew, comment("kubernetes service portals"), jump(chainServices)), "FORWARD", "OUTPUT")
	add(filter, join(comment("kubernetes forwarding rules"), jump(chainForward)), "FORWARD")
	add(filter, join(isNew, comment("kubernetes load balancer firewall"), jump(chainFirewall)), "INPUT", "OUTPUT", "FORWARD")
	add(nat, join(comment("kubernetes service portals"), jump(chainServices)), "OUTPUT", "PREROUTING")
	add(nat, join(comment("kubernetes postrouting rules"), jump(chainPostrouting)), "POSTROUTING")
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
