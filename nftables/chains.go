//go:build linux

package nftables

import (
	"time"

	"golang.org/x/sys/unix"

	"github.com/go-proxier/proxier/ruleset"
)

// chainSpec is one of the chains that are always there.
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

// later is how much later a connection is looked at a second time. A packet can
// meet a transaction that is being committed between two look-ups of the same
// chain: what it found first is of the old state, and what that leads to is gone.
// Another base chain begins with the state of its own moment. It sees only
// connections that no chain before it translated.
const later = 1

// fixedChains returns the chains that do not depend on the Services, those that
// others go to first.
func (w rules) fixedChains() []chainSpec {
	return []chainSpec{
		{chainFirewallCheck, nil, []rule{{drop()}}},
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
		{chainFilterForward, &baseChain{"filter", unix.NF_INET_FORWARD, priorityFilter}, w.filterBase()},
		{chainFilterInput, &baseChain{"filter", unix.NF_INET_LOCAL_IN, priorityFilter}, w.filterInput()},
		{chainFilterOutput, &baseChain{"filter", unix.NF_INET_LOCAL_OUT, priorityFilter}, w.filterBase()},
	}
}

// baseChains returns how the chains that packets come by are hooked in, by name.
func (w rules) baseChains() map[string]*baseChain {
	out := map[string]*baseChain{}
	for _, c := range w.fixedChains() {
		if c.base != nil {
			out[c.name] = c.base
		}
	}
	return out
}

// chainRules renders the handler's chain. It goes to the chains of the handler's
// direct and unguarded forms.
func (c handler) chainRules(w rules, local ruleset.LocalTraffic) []rule {
	if c.firewall {
		return []rule{{jump(chainFirewallCheck)}, {gotoChain(c.unguarded().chain())}}
	}
	toPool := rule{gotoChain(c.direct().chain())}
	internalFirst := func(last rule) []rule {
		var out []rule
		for _, r := range w.isInternal(local) {
			out = append(out, r.with(gotoChain(chainInternal)))
		}
		node := rule(fib(true)).with(w.markForMasquerade()...).with(gotoChain(chainInternal))
		return append(out, node, last)
	}
	switch c.handling {
	case handleReject:
		return stop(w.reject())
	case handleDrop:
		return stop(drop())
	case handleInternalOrDrop:
		return internalFirst(rule{drop()})
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
