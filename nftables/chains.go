//go:build linux

package nftables

import (
	"github.com/google/nftables/expr"
	"golang.org/x/sys/unix"

	"github.com/go-proxier/proxier/internal/inet"
	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/tracker"
)

// chainSpec is a chain that every table has.
type chainSpec struct {
	name  string
	base  *baseChain
	rules []rule
}

// Netfilter's priorities for destination NAT, filtering and source NAT
// (linux/netfilter_ipv4.h, NF_IP_PRI_*).
const (
	priorityDstNAT = -100
	priorityFilter = 0
	prioritySrcNAT = 100
)

// later is the distance in priority between the NAT chains and the chains that look up a
// connection again. If a transaction is committed between two look-ups of a packet, the first
// result is of the old state, and its target may be gone. Another base chain looks up both in
// the new state. It sees only connections that no earlier chain translated.
const later = 1

// fixedChains returns the chains that do not depend on the Services. A chain comes before the
// chains that go to it.
func (w rules) fixedChains() []chainSpec {
	var offload []chainSpec
	if w.offload != nil {
		offload = []chainSpec{{chainToFastPath, nil, w.toFastPath()}}
	}
	return append(offload, []chainSpec{
		{chainFirewallCheck, nil, []rule{w.count(setDropped), {drop()}}},
		{chainInternal, nil, w.internal()},
		{chainNodePorts, nil, []rule{dispatchBy(nodePortKey(firstReg), setNodePorts, setHandlers)}},
		{chainServices, nil, w.services()},
		{chainClusterIPs, nil, w.clusterIPsCheck()},
		{chainOwnNodePorts, nil, []rule{dispatchBy(nodePortKey(firstReg), setNodePorts, setOwnHandlers)}},
		{chainOwnServices, nil, w.ownServices()},
		{chainMasquerading, nil, w.masquerading()},
		{chainNATPrerouting, &baseChain{"nat", unix.NF_INET_PRE_ROUTING, priorityDstNAT}, []rule{{jump(chainServices)}}},
		{chainNATOutput, &baseChain{"nat", unix.NF_INET_LOCAL_OUT, priorityDstNAT}, []rule{{jump(chainServices)}}},
		{chainPreroutingAgain, &baseChain{"nat", unix.NF_INET_PRE_ROUTING, priorityDstNAT + later}, []rule{{jump(chainServices)}}},
		{chainOutputAgain, &baseChain{"nat", unix.NF_INET_LOCAL_OUT, priorityDstNAT + later}, []rule{{jump(chainServices)}}},
		{chainNATPostrouting, &baseChain{"nat", unix.NF_INET_POST_ROUTING, prioritySrcNAT}, []rule{{jump(chainMasquerading)}}},
		{chainFilterForward, &baseChain{"filter", unix.NF_INET_FORWARD, priorityFilter}, w.filterForward()},
		{chainFilterInput, &baseChain{"filter", unix.NF_INET_LOCAL_IN, priorityFilter}, w.filterInput()},
		{chainFilterOutput, &baseChain{"filter", unix.NF_INET_LOCAL_OUT, priorityFilter}, w.filterBase()},
	}...)
}

// baseChains returns the hooks of the base chains by name.
func (w rules) baseChains() map[string]*baseChain {
	out := map[string]*baseChain{}
	for _, c := range w.fixedChains() {
		if c.base != nil {
			out[c.name] = c.base
		}
	}
	return out
}

// chainRules returns the rules of the handler's chain. These go to the chains of the handler's
// direct and unguarded forms.
func (c handler) chainRules(w rules, local ruleset.LocalTraffic) []rule {
	if c.firewall {
		return []rule{{jump(chainFirewallCheck)}, {gotoChain(c.unguarded().chain())}}
	}
	toPool := rule{gotoChain(c.direct().chain())}
	internalFirst := func(last ...rule) []rule {
		var out []rule
		for _, r := range w.isInternal(local) {
			out = append(out, r.with(gotoChain(chainInternal)))
		}
		node := rule(fib(true)).with(w.markForMasquerade()...).with(gotoChain(chainInternal))
		return append(append(out, node), last...)
	}
	switch c.handling {
	case handleReject:
		return w.stop(setRefused, w.reject())
	case handleDrop:
		return w.stop(setDropped, drop())
	case handleInternalOrDrop:
		return internalFirst(w.count(setDropped), rule{drop()})
	case handleInternal:
		return internalFirst(toPool)
	case handleAlways:
		return []rule{rule(w.markForMasquerade()).with(toPool...)}
	case handleNotPods:
		return []rule{w.notInternal(local).with(w.markForMasquerade()...), toPool}
	}
	if c.sticky {
		return []rule{w.toStickyHandler()}
	}
	return w.poolChain(c)
}

// dispatchBy renders a rule that takes a dispatch key from a map and goes to the chain of its
// handler.
func dispatchBy(key []part, dispatchKeys, handlers set) rule {
	r := rule(key).with(found(dispatchKeys), storeDispatch())
	return r.with(loadDispatch(handlerMask)...).with(dispatch(handlers))
}

// toNodePort matches packets to addresses at which NodePorts answer.
func (w rules) toNodePort() rule {
	return rule{w.daddr(firstReg), in(setNodePortIPs)}.with(fib(false)...)
}

// services renders the chain that finds the Service of a new connection.
func (w rules) services() []rule {
	return []rule{
		dispatchBy(w.serviceKey(firstReg), setServiceIPs, setHandlers),
		w.toNodePort().with(gotoChain(chainNodePorts)),
	}
}

// internal renders the chain that gives connections from this node and its pods their dispatch
// key under externalTrafficPolicy Local.
func (w rules) internal() []rule {
	return []rule{
		dispatchBy(w.serviceKey(firstReg), setInternalIPs, setInternalHandlers),
		dispatchBy(nodePortKey(firstReg), setInternalNodePorts, setInternalHandlers),
	}
}

// filterBase resets the priority of a new connection after the NAT chains, and rejects packets
// to cluster IPs that were not translated.
func (w rules) filterBase() []rule {
	restore := rule(ctNew()).with(ctDNAT()...).with(hasDispatch()...).with(resetPriority()...)
	return []rule{restore, rule(ctNew()).with(jump(chainClusterIPs))}
}

// filterForward renders filterBase and, with Config.Offload, the rule that leads to the fast
// path.
func (w rules) filterForward() []rule {
	if w.offload == nil {
		return w.filterBase()
	}
	return append(w.filterBase(), w.established())
}

// resetPriority removes the dispatch key from the packet.
func resetPriority() []part {
	return []part{
		of(&expr.Immediate{Register: firstReg, Data: word(0)}),
		store(expr.MetaKeyPRIORITY, firstReg),
	}
}

// filterInput stops the node's connections to itself that the chains of stop let pass in the
// output hook. Unlike the NAT chains, it sees every packet of such a connection.
func (w rules) filterInput() []rule {
	own := rule(interfaceIs(expr.MetaKeyIIFNAME, loopbackInterface)).with(ctNew()...).with(ctNotDNAT()...)
	return []rule{own.with(jump(chainOwnServices))}
}

// ownServices finds the Service of the node's connection to itself again. The map own-handlers
// has only the handlers that reject or drop.
func (w rules) ownServices() []rule {
	return []rule{
		dispatchBy(w.serviceKey(firstReg), setServiceIPs, setOwnHandlers),
		w.toNodePort().with(jump(chainOwnNodePorts)),
		rule(hasDispatch()).with(resetPriority()...),
	}
}

// stop renders a chain that counts a packet in a set and ends its connection by the verdict.
// In the output hook, packets from the node to itself go on to filter-input, because the kernel
// returns EPERM to a socket whose packet is stopped in the output hook.
func (w rules) stop(counters set, verdict part) []rule {
	own := rule(toItself()).with(resetPriority()...)
	return []rule{own.with(returnChain()), w.count(counters), {verdict}}
}

// count adds a packet that was not translated to the counter of its destination. If the set is
// full, the rule ends there. So a verdict that must not depend on the counter belongs in the
// next rule.
func (w rules) count(s set) rule {
	return rule(w.serviceKey(countReg)).with(of(&expr.Dynset{
		SetName: s.name(), SrcRegKey: countReg, Operation: unix.NFT_DYNSET_OP_UPDATE,
		Exprs: []expr.Any{&expr.Counter{}},
	}))
}

func (w rules) clusterIPsCheck() []rule {
	return []rule{
		rule(toItself()).with(returnChain()),
		{w.daddr(firstReg), in(setClusterIPs), w.reject()},
		{w.daddr(firstReg), in(setServiceCIDRs), drop()},
	}
}

func (w rules) masquerading() []rule {
	marked := rule{
		load(expr.MetaKeyMARK, firstReg), masked(firstReg, w.mark, 0), equal(firstReg, word(w.mark)),
		load(expr.MetaKeyMARK, firstReg), masked(firstReg, ^w.mark, 0), store(expr.MetaKeyMARK, firstReg),
		masquerade(),
	}
	hairpin := rule(ctDNAT()).with(w.saddr(firstReg), w.daddr(firstReg+w.words()), in(setHairpin), masquerade())
	return []rule{marked, hairpin}
}

// allowedSource lets sources within prefixes of the given length pass the firewall.
func (w rules) allowedSource(bits int) rule {
	r := rule{w.saddr(firstReg)}.with(w.prefixed(bits)...)
	return r.with(w.serviceKey(firstReg+w.words())...).with(in(allowed(bits)), returnChain())
}

// hashed loads a number below n behind a pool's number: the Jenkins hash of the connection's
// source address, or of that and the source port, scaled down (linux/netfilter/nf_tables.h,
// NFT_HASH_JENKINS).
func (w rules) hashed(h tracker.Hash, n uint32) []part {
	parts, length := []part{w.saddr(hashReg)}, w.addrLen()
	if h == tracker.HashSourcePort {
		parts, length = append(parts, sport(hashReg+w.words())), length+4
	}
	return append(parts, of(&expr.Hash{
		SourceRegister: hashReg, DestRegister: firstReg + 1, Length: length,
		Modulus: n, Seed: w.seed, Type: expr.HashTypeJenkins,
	}))
}

// poolChain counts the connection, draws a bucket or finds it by a hash, and sends the connection
// to the endpoint in the bucket.
//
// The first rule only counts, and does nothing if the set of counters is full. It does not look
// up the map endpoints, because the kernel checks each new element of a map against every rule
// that looks it up.
func (w rules) poolChain(c handler) []rule {
	choose := func(bucket ...part) rule {
		return rule(loadDispatch(poolMask)).with(bucket...).with(found(setEndpoints), w.dnat())
	}
	draw := func(n int) rule { return choose(random(uint32(n))) }
	count := rule(w.count(setConnections))
	switch n := c.buckets; {
	case c.hash != tracker.HashNone:
		return []rule{count, choose(w.hashed(c.hash, uint32(n))...)}
	case n <= exactBuckets:
		return []rule{count, draw(n)}
	default:
		// Fewer than one draw in five finds an empty bucket. After four empty buckets, the
		// last rule draws from the buckets that are never empty.
		return []rule{count, draw(n), draw(n), draw(n), draw(n), draw(bucketsBelow(n))}
	}
}

// isInternal returns a condition for each way in which a connection comes from one of this
// node's pods.
func (w rules) isInternal(l ruleset.LocalTraffic) []rule {
	return w.localTraffic(l, equal)
}

// notInternal returns the condition under which a connection does not come from one of this
// node's pods.
func (w rules) notInternal(l ruleset.LocalTraffic) rule {
	var all rule
	for _, r := range w.localTraffic(l, differs) {
		all = all.with(r...)
	}
	return all
}

func (w rules) localTraffic(l ruleset.LocalTraffic, cmp func(uint32, []byte) part) []rule {
	switch {
	case l.Bridge != "":
		return []rule{{load(expr.MetaKeyIIFNAME, firstReg), cmp(firstReg, interfaceName(l.Bridge))}}
	case l.InterfacePrefix != "":
		return []rule{{load(expr.MetaKeyIIFNAME, firstReg), cmp(firstReg, []byte(l.InterfacePrefix))}}
	}
	var out []rule
	for _, c := range inet.Prefixes(l.CIDRs, w.family) {
		r := rule{w.saddr(firstReg)}.with(w.prefixed(c.Bits())...)
		out = append(out, r.with(cmp(firstReg, c.Addr().AsSlice())))
	}
	return out
}
