//go:build linux

package kernel

import (
	"slices"

	"github.com/google/nftables/expr"
	"golang.org/x/sys/unix"

	"github.com/go-proxier/proxier/internal/inet"
	"github.com/go-proxier/proxier/nftables/internal/layout"
	"github.com/go-proxier/proxier/nftables/internal/model"
	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/tracker"
)

// chainSpec is a chain that every table has.
type chainSpec struct {
	name  string
	base  *BaseChain
	rules []rule
}

// Netfilter's priorities for destination NAT, filtering and source NAT
// (linux/netfilter_ipv4.h, NF_IP_PRI_*).
const (
	priorityDstNAT = -100
	priorityFilter = 0
	prioritySrcNAT = 100
)

// retryPriority is added to the priority of the -again chains. If a transaction commits between
// a packet's two look-ups, the second may fail. The -again chain, one priority later, repeats both
// against the new state. It sees only connections that no earlier chain translated.
const retryPriority = 1

// fixedChains returns the chains that do not depend on the Services. A chain comes before the
// chains that go to it.
func (w Rules) fixedChains() []chainSpec {
	var offload []chainSpec
	if w.Offload != nil {
		offload = []chainSpec{{layout.ChainToFastPath, nil, w.toFastPath()}}
	}
	return append(offload, []chainSpec{
		{layout.ChainFirewallCheck, nil, []rule{w.count(layout.Dropped), {drop()}}},
		{layout.ChainInternal, nil, w.internal()},
		{layout.ChainNodePorts, nil, []rule{dispatchBy(nodePortKey(firstReg), layout.NodePorts, layout.Handlers)}},
		{layout.ChainServices, nil, w.services()},
		{layout.ChainClusterIPs, nil, w.clusterIPsCheck()},
		{layout.ChainOwnNodePorts, nil, []rule{dispatchBy(nodePortKey(firstReg), layout.NodePorts, layout.OwnHandlers)}},
		{layout.ChainOwnServices, nil, w.ownServices()},
		{layout.ChainMasquerading, nil, w.masquerading()},
		{layout.ChainNATPrerouting, &BaseChain{"nat", unix.NF_INET_PRE_ROUTING, priorityDstNAT}, []rule{{jump(layout.ChainServices)}}},
		{layout.ChainNATOutput, &BaseChain{"nat", unix.NF_INET_LOCAL_OUT, priorityDstNAT}, []rule{{jump(layout.ChainServices)}}},
		{layout.ChainPreroutingAgain, &BaseChain{"nat", unix.NF_INET_PRE_ROUTING, priorityDstNAT + retryPriority}, []rule{{jump(layout.ChainServices)}}},
		{layout.ChainOutputAgain, &BaseChain{"nat", unix.NF_INET_LOCAL_OUT, priorityDstNAT + retryPriority}, []rule{{jump(layout.ChainServices)}}},
		{layout.ChainNATPostrouting, &BaseChain{"nat", unix.NF_INET_POST_ROUTING, prioritySrcNAT}, []rule{{jump(layout.ChainMasquerading)}}},
		{layout.ChainFilterForward, &BaseChain{"filter", unix.NF_INET_FORWARD, priorityFilter}, w.filterForward()},
		{layout.ChainFilterInput, &BaseChain{"filter", unix.NF_INET_LOCAL_IN, priorityFilter}, w.filterInput()},
		{layout.ChainFilterOutput, &BaseChain{"filter", unix.NF_INET_LOCAL_OUT, priorityFilter}, w.filterBase()},
	}...)
}

// Outline returns the chains that objects create: the hooks of base chains, and the number of rules
// of each chain.
func (w Rules) Outline(objects []model.Object) (base map[string]*BaseChain, rules map[string]int) {
	base, rules = map[string]*BaseChain{}, map[string]int{}
	for i := range objects {
		for _, c := range w.chainsOf(&objects[i]) {
			rules[c.name] = len(c.rules)
			if c.base != nil {
				base[c.name] = c.base
			}
		}
	}
	return base, rules
}

// chainsOf returns the chains that an object creates.
func (w Rules) chainsOf(o *model.Object) []chainSpec {
	h := o.Sticky
	switch o.Kind {
	case model.HandlerChain:
		return []chainSpec{{o.Handler.Chain(), nil, w.handler(o.Handler)}}
	case model.StickyChains:
		return []chainSpec{
			{layout.ChainStickySend, nil, w.stickySend()},
			{layout.ChainStickyRecall, nil, w.stickyRecall()},
			{layout.ChainStickyConfirm, nil, w.stickyConfirm()},
		}
	case model.ChooserChain:
		return []chainSpec{{h.Chooser(), nil, w.stickyChooser(h)}}
	case model.StickyChain:
		return []chainSpec{{h.Chain(), nil, w.stickyChain(h)}}
	case model.RangeStickyChains:
		return []chainSpec{
			{layout.ChainRangeStickySend, nil, w.rangeStickySend()},
			{layout.ChainRangeStickyConfirm, nil, []rule{w.recall(), {gotoChain(layout.ChainRangeStickySend)}}},
		}
	case model.RangeChains:
		return []chainSpec{
			{layout.ChainRangeFirewallCheck, nil, w.rangeFirewallCheck()},
			{layout.ChainInternalRanges, nil, []rule{w.dispatchRange(layout.InternalRangeKeys, layout.InternalHandlers)}},
			{layout.ChainOwnRanges, nil, []rule{w.dispatchRange(layout.RangeKeys, layout.OwnHandlers)}},
			{layout.ChainRanges, nil, []rule{w.dispatchRange(layout.RangeKeys, layout.Handlers)}},
		}
	case model.UseRanges, model.UnuseRanges:
		out := slices.DeleteFunc(w.fixedChains(), func(c chainSpec) bool { return !layout.LeadsToRanges(c.name) })
		for i := range out {
			if o.Kind == model.UseRanges {
				out[i].rules = toRanges(out[i])
			}
		}
		return out
	case model.PacketCounters:
		return w.packetChains()
	case model.FixedChains, model.BaseChains:
		return slices.DeleteFunc(w.fixedChains(), func(c chainSpec) bool { return (c.base != nil) != (o.Kind == model.BaseChains) })
	}
	return nil
}

// handler returns the rules of the handler's chain. These go to the chains of the handler's
// direct and unguarded forms.
func (w Rules) handler(c layout.Handler) []rule {
	check, internal := layout.ChainFirewallCheck, layout.ChainInternal
	if c.Range {
		check, internal = layout.ChainRangeFirewallCheck, layout.ChainInternalRanges
	}
	if c.Firewall {
		return []rule{{jump(check)}, {gotoChain(c.Unguarded().Chain())}}
	}
	toPool := rule{gotoChain(c.Direct().Chain())}
	internalFirst := func(last ...rule) []rule {
		var out []rule
		for _, r := range w.isInternal(w.Local) {
			out = append(out, r.with(gotoChain(internal)))
		}
		node := rule(fib(true)).with(w.markForMasquerade()...).with(gotoChain(internal))
		return append(append(out, node), last...)
	}
	switch c.Handling {
	case layout.HandleReject:
		return w.stop(c, layout.Refused, w.reject())
	case layout.HandleDrop:
		return w.stop(c, layout.Dropped, drop())
	case layout.HandleInternalOrDrop:
		if c.Range {
			return internalFirst(rule{drop()})
		}
		return internalFirst(w.count(layout.Dropped), rule{drop()})
	case layout.HandleInternalOrPass:
		return internalFirst(resetPriority())
	case layout.HandleInternal:
		return internalFirst(toPool)
	case layout.HandleAlways:
		return []rule{rule(w.markForMasquerade()).with(toPool...)}
	case layout.HandleNotPods:
		return []rule{w.notInternal(w.Local).with(w.markForMasquerade()...), toPool}
	}
	if c.Sticky {
		if c.Range {
			return []rule{w.toStickyHandler(layout.RangeStickyHandlers)}
		}
		return []rule{w.toStickyHandler(layout.StickyHandlers)}
	}
	return w.poolChain(c)
}

// dispatchBy renders a rule that takes a dispatch key from a map and goes to the chain of its
// handler.
func dispatchBy(key []part, dispatchKeys, handlers layout.Set) rule {
	r := rule(key).with(found(dispatchKeys), storeDispatch())
	return r.with(loadDispatch(layout.HandlerMask)...).with(dispatch(handlers))
}

// dispatchRange renders a rule that takes the number of a range of ports from service-ranges and its
// dispatch key from another map, and goes to the chain of its handler.
func (w Rules) dispatchRange(keys, handlers layout.Set) rule {
	r := rule(w.serviceKey(firstReg)).with(found(layout.ServiceRanges), storeDispatch())
	r = r.with(load(expr.MetaKeyPRIORITY, firstReg), found(keys), storeDispatch())
	return r.with(loadDispatch(layout.HandlerMask)...).with(dispatch(handlers))
}

// toRanges returns the rules of a chain with those that look up ranges of ports. A range has
// its turn if the destination is no single port and no NodePort, whatever happens to packets to
// these.
func toRanges(c chainSpec) []rule {
	last := len(c.rules)
	if c.name != layout.ChainOwnServices {
		return append(c.rules[:last:last], rule{gotoChain(layout.ChainRanges)})
	}
	// The rules before leave a dispatch key if the destination is a single port or a NodePort.
	reset := c.rules[last-1]
	return append(c.rules[:last-1:last-1], reset.with(returnChain()), rule{jump(layout.ChainOwnRanges)}, reset)
}

// rangeFirewallCheck lets the allowed sources of ranges of ports pass the firewall.
func (w Rules) rangeFirewallCheck() []rule {
	allowed := rule{w.saddr(firstReg)}.with(w.serviceKey(firstReg + w.words())...)
	return []rule{allowed.with(in(layout.RangeSources), returnChain()), {drop()}}
}

// toNodePort matches packets to addresses at which NodePorts answer.
func (w Rules) toNodePort() rule {
	return rule{w.daddr(firstReg), in(layout.NodePortIPs)}.with(fib(false)...)
}

// services renders the chain that finds the Service of a new connection.
func (w Rules) services() []rule {
	return []rule{
		dispatchBy(w.serviceKey(firstReg), layout.ServiceIPs, layout.Handlers),
		w.toNodePort().with(gotoChain(layout.ChainNodePorts)),
	}
}

// internal renders the chain that gives connections from this node and its pods their dispatch
// key under externalTrafficPolicy Local.
func (w Rules) internal() []rule {
	return []rule{
		dispatchBy(w.serviceKey(firstReg), layout.InternalIPs, layout.InternalHandlers),
		dispatchBy(nodePortKey(firstReg), layout.InternalNodePorts, layout.InternalHandlers),
	}
}

// filterBase resets the priority of a new connection after the NAT chains, and rejects packets
// to cluster IPs that were not translated.
func (w Rules) filterBase() []rule {
	restore := rule(ctNew()).with(ctDNAT()...).with(hasDispatch()...).with(resetPriority()...)
	return []rule{restore, rule(ctNew()).with(jump(layout.ChainClusterIPs))}
}

// filterForward renders filterBase and, with Config.Offload, the rule that leads to the fast
// path.
func (w Rules) filterForward() []rule {
	if w.Offload == nil {
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
func (w Rules) filterInput() []rule {
	own := rule(interfaceIs(expr.MetaKeyIIFNAME, layout.LoopbackInterface)).with(ctNew()...).with(ctNotDNAT()...)
	return []rule{own.with(jump(layout.ChainOwnServices))}
}

// ownServices finds the Service of the node's connection to itself again. The map own-handlers
// has only the handlers that reject or drop.
func (w Rules) ownServices() []rule {
	return []rule{
		dispatchBy(w.serviceKey(firstReg), layout.ServiceIPs, layout.OwnHandlers),
		w.toNodePort().with(jump(layout.ChainOwnNodePorts)),
		rule(hasDispatch()).with(resetPriority()...),
	}
}

// stop renders a chain that counts a packet in a set, unless the handler is for ranges of ports,
// and ends its connection by the verdict.
// In the output hook, packets from the node to itself go on to filter-input, because the kernel
// returns EPERM to a socket whose packet is stopped in the output hook.
func (w Rules) stop(c layout.Handler, counters layout.Set, verdict part) []rule {
	own := rule(toItself()).with(resetPriority()...)
	if c.Range {
		return []rule{own.with(returnChain()), {verdict}}
	}
	return []rule{own.with(returnChain()), w.count(counters), {verdict}}
}

// count adds a packet that was not translated to the counter of its destination. If the set is
// full, the rule ends there. So a verdict that must not depend on the counter belongs in the
// next rule.
func (w Rules) count(s layout.Set) rule {
	return rule(w.serviceKey(countReg)).with(of(&expr.Dynset{
		SetName: s.Name(), SrcRegKey: countReg, Operation: unix.NFT_DYNSET_OP_UPDATE,
		Exprs: []expr.Any{&expr.Counter{}},
	}))
}

func (w Rules) clusterIPsCheck() []rule {
	return []rule{
		rule(toItself()).with(returnChain()),
		{w.daddr(firstReg), in(layout.ClusterIPs), w.reject()},
		{w.daddr(firstReg), in(layout.ServiceCIDRs), drop()},
	}
}

func (w Rules) masquerading() []rule {
	marked := rule{
		load(expr.MetaKeyMARK, firstReg), masked(firstReg, w.Mark, 0), equal(firstReg, word(w.Mark)),
		load(expr.MetaKeyMARK, firstReg), masked(firstReg, ^w.Mark, 0), store(expr.MetaKeyMARK, firstReg),
		masquerade(),
	}
	hairpin := rule(ctDNAT()).with(w.saddr(firstReg), w.daddr(firstReg+w.words()), in(layout.Hairpin), masquerade())
	return []rule{marked, hairpin}
}

// allowedSource lets sources within prefixes of the given length pass the firewall.
func (w Rules) allowedSource(bits int) rule {
	r := rule{w.saddr(firstReg)}.with(w.prefixed(bits)...)
	return r.with(w.serviceKey(firstReg+w.words())...).with(in(layout.Allowed(bits)), returnChain())
}

// hashed loads a number below n behind a pool's number: the Jenkins hash of the connection's
// source address, or of that and the source port, scaled down (linux/netfilter/nf_tables.h,
// NFT_HASH_JENKINS).
func (w Rules) hashed(h tracker.Hash, n uint32) []part {
	parts, length := []part{w.saddr(hashReg)}, w.addrLen()
	if h == tracker.HashSourcePort {
		parts, length = append(parts, sport(hashReg+w.words())), length+4
	}
	return append(parts, of(&expr.Hash{
		SourceRegister: hashReg, DestRegister: firstReg + 1, Length: length,
		Modulus: n, Seed: w.Seed, Type: expr.HashTypeJenkins,
	}))
}

// poolChain counts the connection, draws a bucket or finds it by a hash, and sends the connection
// to the endpoint in the bucket.
//
// The first rule only counts, and does nothing if the set of counters is full. It does not look
// up a map of endpoints, because the kernel checks each new element of a map against every rule
// that looks it up.
func (w Rules) poolChain(c layout.Handler) []rule {
	if c.Range {
		// There is no counter: one for each port that some client tries would fill the set.
		return append(w.choices(c, w.dnatShifted(layout.PoolMask)...), w.choices(c, w.dnatAddr())...)
	}
	return append([]rule{w.count(layout.Connections)}, w.choices(c, w.dnat())...)
}

// choices renders the rules that choose a bucket and translate the connection to its endpoint.
func (w Rules) choices(c layout.Handler, translate ...part) []rule {
	var out []rule
	for _, p := range serviceProtocols {
		out = append(out, w.choicesOf(p, c, translate)...)
	}
	return out
}

// choicesOf renders the rules for the endpoints of one protocol.
func (w Rules) choicesOf(protocol byte, c layout.Handler, translate []part) []rule {
	choose := func(bucket ...part) rule {
		match := rule{proto(firstReg), equal(firstReg, []byte{protocol})}.with(loadDispatch(layout.PoolMask)...)
		return match.with(bucket...).with(found(layout.EndpointsOf(inet.ProtocolOf(protocol)))).with(translate...)
	}
	draw := func(n int) rule { return choose(random(uint32(n))) }
	switch n := c.Buckets; {
	case c.Hash != tracker.HashNone:
		return []rule{choose(w.hashed(c.Hash, uint32(n))...)}
	case n <= layout.ExactBuckets:
		return []rule{draw(n)}
	default:
		// Fewer than one draw in five finds an empty bucket. After four empty buckets, the
		// last rule draws from the buckets that are never empty.
		return []rule{draw(n), draw(n), draw(n), draw(n), draw(layout.BucketsBelow(n))}
	}
}

// isInternal returns a condition for each way in which a connection comes from one of this
// node's pods.
func (w Rules) isInternal(l ruleset.LocalTraffic) []rule {
	return w.localTraffic(l, equal)
}

// notInternal returns the condition under which a connection does not come from one of this
// node's pods.
func (w Rules) notInternal(l ruleset.LocalTraffic) rule {
	var all rule
	for _, r := range w.localTraffic(l, differs) {
		all = all.with(r...)
	}
	return all
}

func (w Rules) localTraffic(l ruleset.LocalTraffic, cmp func(uint32, []byte) part) []rule {
	switch {
	case l.Bridge != "":
		return []rule{{load(expr.MetaKeyIIFNAME, firstReg), cmp(firstReg, interfaceName(l.Bridge))}}
	case l.InterfacePrefix != "":
		return []rule{{load(expr.MetaKeyIIFNAME, firstReg), cmp(firstReg, []byte(l.InterfacePrefix))}}
	}
	var out []rule
	for _, c := range inet.Prefixes(l.CIDRs, w.Family) {
		r := rule{w.saddr(firstReg)}.with(w.prefixed(c.Bits())...)
		out = append(out, r.with(cmp(firstReg, c.Addr().AsSlice())))
	}
	return out
}
