//go:build linux

package nftables

import (
	"time"

	"github.com/google/nftables/expr"
	"golang.org/x/sys/unix"

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

// later is how much later a connection is looked at a second time. A packet can meet a
// transaction that is committed between two look-ups of the same chain: the first result is of
// the old state, and what it leads to is gone. Another base chain begins with the state of its
// own moment. It sees only connections that no chain before it translated.
const later = 1

// fixedChains returns the chains that do not depend on the Services. Chains that others go to
// come first.
func (w rules) fixedChains() []chainSpec {
	var offload []chainSpec
	if w.offload != nil {
		offload = []chainSpec{{chainToFastPath, nil, w.toFastPath()}}
	}
	return append(offload, []chainSpec{
		{chainFirewallCheck, nil, []rule{w.count(setDropped), {drop()}}},
		{chainInternal, nil, w.internal()},
		{chainNodePorts, nil, w.nodePorts()},
		{chainServices, nil, w.services()},
		{chainClusterIPs, nil, w.clusterIPsCheck()},
		{chainOwnNodePorts, nil, w.ownNodePorts()},
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

// baseChains returns how the base chains are hooked in, by name.
func (w rules) baseChains() map[string]*baseChain {
	out := map[string]*baseChain{}
	for _, c := range w.fixedChains() {
		if c.base != nil {
			out[c.name] = c.base
		}
	}
	return out
}

// chainRules returns the rules of the handler's chain. It goes to the chains of the handler's
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
	if c.affinity != 0 {
		return w.stickyChain(c, time.Duration(seconds(c.affinity))*time.Second)
	}
	return w.poolChain(c)
}

// dispatchBy takes a dispatch key from a map and goes to the chain of its handler.
func dispatchBy(key []part, dispatchKeys, handlers set) rule {
	r := rule(key).with(found(dispatchKeys), storeDispatch())
	return r.with(loadDispatch(handlerMask)...).with(dispatch(handlers))
}

// toNodePort matches packets to addresses at which NodePorts answer.
func (w rules) toNodePort() rule {
	return rule{w.daddr(firstReg), in(setNodePortIPs)}.with(fib(false)...)
}

// services finds the Service that a new connection is for.
func (w rules) services() []rule {
	return []rule{
		dispatchBy(w.serviceKey(firstReg), setServiceIPs, setHandlers),
		w.toNodePort().with(gotoChain(chainNodePorts)),
	}
}

func (w rules) nodePorts() []rule {
	return []rule{dispatchBy(nodePortKey(firstReg), setNodePorts, setHandlers)}
}

// internal gives connections from this node and its pods their dispatch key under
// externalTrafficPolicy Local.
func (w rules) internal() []rule {
	return []rule{
		dispatchBy(w.serviceKey(firstReg), setInternalIPs, setInternalHandlers),
		dispatchBy(nodePortKey(firstReg), setInternalNodePorts, setInternalHandlers),
	}
}

// filterBase resets the priority of a new connection behind the NAT chains, and refuses cluster
// IPs that were not translated.
func (w rules) filterBase() []rule {
	restore := rule(ctNew()).with(ctDNAT()...).with(hasDispatch()...).with(resetPriority()...)
	return []rule{restore, rule(ctNew()).with(jump(chainClusterIPs))}
}

// filterForward is filterBase and, with Config.Offload, the way to the fast path.
func (w rules) filterForward() []rule {
	if w.offload == nil {
		return w.filterBase()
	}
	return append(w.filterBase(), w.established())
}

// resetPriority takes a dispatch key off the packet.
func resetPriority() []part {
	return []part{
		of(&expr.Immediate{Register: firstReg, Data: word(0)}),
		store(expr.MetaKeyPRIORITY, firstReg),
	}
}

// filterInput stops the connections of the node to itself that stop let pass in the
// output hook. Unlike the NAT chains, it sees every packet of them.
func (w rules) filterInput() []rule {
	own := rule(interfaceIs(expr.MetaKeyIIFNAME, loopbackInterface)).with(ctNew()...).with(ctNotDNAT()...)
	return []rule{own.with(jump(chainOwnServices))}
}

// ownServices and ownNodePorts look up again which Service a connection of the node
// to itself is for. The map own-handlers has only the handlers that reject or drop.
func (w rules) ownServices() []rule {
	return []rule{
		dispatchBy(w.serviceKey(firstReg), setServiceIPs, setOwnHandlers),
		w.toNodePort().with(jump(chainOwnNodePorts)),
		rule(hasDispatch()).with(resetPriority()...),
	}
}

func (w rules) ownNodePorts() []rule {
	return []rule{dispatchBy(nodePortKey(firstReg), setNodePorts, setOwnHandlers)}
}

// stop renders a chain that counts a packet in a set and ends its connection by the verdict.
// What the node sends to itself goes on to filter-input, which ends it: the kernel returns
// EPERM to a socket whose packet is stopped in the output hook.
func (w rules) stop(counters set, verdict part) []rule {
	own := rule(toItself()).with(resetPriority()...)
	return []rule{own.with(returnChain()), w.count(counters), {verdict}}
}

// count counts a packet that was not translated in the element of its destination. A full set
// ends the rule, so a verdict that must not depend on it belongs in the next rule.
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
// The first rule only counts. If there is no room for another counter it does nothing, and the
// rules behind it forward the connection. Each rule that looks in the map endpoints makes it
// dearer to fill: the kernel checks every new element against every such rule, for 15 ns each.
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
		// Fewer than one draw in five finds an empty bucket. Should four in a row, the
		// last is among the buckets that are never empty.
		return []rule{count, draw(n), draw(n), draw(n), draw(n), draw(bucketsBelow(n))}
	}
}

// send returns two rules that send the connection to the endpoint that was chosen. The first
// counts it, too. It does nothing if there is no room for another counter.
func (w rules) send(choice rule) []rule {
	return []rule{choice.with(w.count(setConnections)...).with(w.dnat()), choice.with(w.dnat())}
}

// stickyChain sends the connection to the endpoint that its client was sent to last, if that is
// still in the pool. Otherwise it draws an endpoint, or finds it by a hash, and remembers it.
func (w rules) stickyChain(c handler, timeout time.Duration) []rule {
	buckets := c.buckets
	client := append(loadDispatch(stickyMask), w.saddr(firstReg+1))
	remember := func(op uint32) rule {
		return rule(client).with(load(expr.MetaKeyPRIORITY, dynsetDataReg), of(&expr.Dynset{
			SetName: setStickyClients.name(), SrcRegKey: firstReg, SrcRegData: dynsetDataReg,
			Operation: op, Timeout: timeout,
		}))
	}
	recall := rule(client).with(found(setStickyClients), storeDispatch())
	endpoint := rule{load(expr.MetaKeyPRIORITY, firstReg), found(setStickyEndpoints)}
	known := []part{load(expr.MetaKeyPRIORITY, firstReg), masked(firstReg, ^uint32(stickyMask), 0), differs(firstReg, word(0))}
	draw := func(n int) rule {
		bucket := []part{random(uint32(n))}
		if c.hash != tracker.HashNone {
			bucket = w.hashed(c.hash, uint32(n))
		}
		return rule(loadDispatch(stickyMask)).with(bucket...).with(found(setStickyBuckets), storeDispatch())
	}

	rules := []rule{
		{load(expr.MetaKeyPRIORITY, firstReg), shifted(firstReg, stickyShift), storeDispatch()},
		recall,
	}
	rules = append(rules, w.send(rule(known).with(remember(unix.NFT_DYNSET_OP_UPDATE)...).with(endpoint...))...)
	rules = append(rules,
		// Not sent on: nothing is remembered, or an endpoint that is gone.
		remember(dynsetDelete),
		rule(loadDispatch(stickyMask)).with(storeDispatch()),
	)
	// A draw whose bucket was empty leaves the dispatch key as it was. One that hit turns it
	// into an endpoint's, whose pool part the next draw would start from again: so
	// the surest comes first and the most even last.
	if buckets > exactBuckets && c.hash == tracker.HashNone {
		rules = append(rules, draw(bucketsBelow(buckets)), draw(buckets), draw(buckets), draw(buckets))
	}
	rules = append(rules,
		draw(buckets),
		remember(unix.NFT_DYNSET_OP_UPDATE),
		// Another connection of the client's may have been remembered first.
		recall,
	)
	return append(rules, w.send(endpoint)...)
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
	for _, c := range l.CIDRs {
		if tracker.FamilyOf(c.Addr()) != w.family {
			continue
		}
		r := rule{w.saddr(firstReg)}.with(w.prefixed(c.Bits())...)
		out = append(out, r.with(cmp(firstReg, c.Masked().Addr().AsSlice())))
	}
	return out
}
