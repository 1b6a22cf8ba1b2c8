//go:build linux

package nftables

import (
	"golang.org/x/sys/unix"
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
		{chainMasquerading, nil, w.masquerading()},
		{chainNATPrerouting, &baseChain{"nat", unix.NF_INET_PRE_ROUTING, priorityDstNAT}, []rule{{jump(chainServices)}}},
		{chainNATOutput, &baseChain{"nat", unix.NF_INET_LOCAL_OUT, priorityDstNAT}, []rule{{jump(chainServices)}}},
		{chainPreroutingAgain, &baseChain{"nat", unix.NF_INET_PRE_ROUTING, priorityDstNAT + later}, []rule{{jump(chainServices)}}},
		{chainOutputAgain, &baseChain{"nat", unix.NF_INET_LOCAL_OUT, priorityDstNAT + later}, []rule{{jump(chainServices)}}},
		{chainNATPostrouting, &baseChain{"nat", unix.NF_INET_POST_ROUTING, prioritySrcNAT}, []rule{{jump(chainMasquerading)}}},
		{chainFilterForward, &baseChain{"filter", unix.NF_INET_FORWARD, priorityFilter}, w.filterBase()},
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

// skeleton writes everything of a table that does not depend on the Services. The
// sets must have their sizes.
func (t *table) skeleton(w *writer) {
	for s := setLayout; s < firstAllowed; s++ {
		if !t.kept[s] {
			w.newSet(t, s)
		}
	}
	for _, c := range w.rules(t).fixedChains() {
		if c.base == nil || !t.unhooked {
			w.hookedChain(t, c.name, c.base, c.rules)
		}
	}
	var key buffer
	n := key.word(0, layoutVersion)
	w.adds(t, setLayout).Add(key[:n], nil, "version of the layout of this table")
	w.setRanges(t, setNodePortIPs, nodePortRanges(t.node.NodePorts(t.family), t.family))
}

// hook has packets meet a table that they did not.
func (t *table) hook(w *writer) {
	t.unhooked = false
	for _, c := range w.rules(t).fixedChains() {
		if c.base != nil {
			w.hookedChain(t, c.name, c.base, c.rules)
		}
	}
}
