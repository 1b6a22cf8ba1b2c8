//go:build linux

package main

import (
	"fmt"
	"maps"
	"slices"
)

// nftFaults damage the tables of mode nftables.
var nftFaults = []fault{
	shell("flush ruleset", "nft flush ruleset"),
	{"delete table", func(w *world) (string, error) {
		return w.shell("nft delete table " + w.family() + " proxier"), nil
	}},
	{"flush set", func(w *world) (string, error) {
		set := pick(w.rng, "service-ips", "endpoints", "service-nodeports", "handlers", "sticky-endpoints", "cluster-ips", "hairpin-connections", "nodeport-ips", "internal-service-ips")
		f := w.family()
		return w.shell(fmt.Sprintf("nft flush set %s proxier %s || nft flush map %s proxier %s", f, set, f, set)), nil
	}},
	{"flush chain", func(w *world) (string, error) {
		chain := pick(w.rng, "services", "masquerading", "nat-output", "filter-forward", "firewall-check", "pool-1", "pool-2", "cluster-ip-1")
		return w.shell(fmt.Sprintf("nft flush chain %s proxier %s", w.family(), chain)), nil
	}},
	{"delete element", func(w *world) (string, error) {
		f, set := w.family(), pick(w.rng, "service-ips", "endpoints", "service-nodeports", "cluster-ips")
		text, err := w.node.Output("nft", "-s", "list", "table", f, "proxier")
		if err != nil {
			return "no table", nil
		}
		keys := slices.Sorted(maps.Keys(parseNFT(text).sets[set]))
		if len(keys) == 0 {
			return "no element", nil
		}
		return w.shell(fmt.Sprintf("nft delete element %s proxier %s '{ %s }'", f, set, pick(w.rng, keys...))), nil
	}},
	{"insert rule", func(w *world) (string, error) {
		return w.shell("nft insert rule " + w.family() + " proxier services counter"), nil
	}},
	{"foreign table", func(w *world) (string, error) {
		return w.shell(fmt.Sprintf("nft 'add table %[1]s other; add chain %[1]s other c { type nat hook prerouting priority -100; }; add rule %[1]s other c counter'; nft delete table %[1]s other", w.family())), nil
	}},
}

// offloadFaults damage the flowtable.
var offloadFaults = []fault{
	{"delete rules of the flowtable", func(w *world) (string, error) {
		return w.shell("nft flush chain " + w.family() + " proxier to-fast-path"), nil
	}},
	{"interface", func(w *world) (string, error) {
		l := pick(w.rng, "veth0", "veth1", "veth2", "veth3")
		return l, w.node.toggle(l)
	}},
}

// family returns an address family as nft names it.
func (w *world) family() string { return pick(w.rng, "ip", "ip6") }
