package model

import (
	"net/netip"
	"testing"

	"github.com/go-proxier/proxier/internal/testing/must"
	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/tracker"
)

// TestOnlyOtherAddressesNeedTheKernel selects addresses for NodePorts on a node with one in each family. A
// change between own and other addresses changes rules.
func TestOnlyOtherAddressesNeedTheKernel(t *testing.T) {
	t.Parallel()
	info := tracker.NodeInfo{Name: "n", Addresses: []netip.Addr{netip.MustParseAddr("192.0.2.1"), netip.MustParseAddr("2001:db8::1")}}
	node := func(values ...string) *ruleset.Node {
		addrs := must.Get(ruleset.ParseNodePortAddresses(values))(t)
		return &ruleset.Node{Info: info, NodePorts4: addrs.Resolve(info, tracker.IPv4), NodePorts6: addrs.Resolve(info, tracker.IPv6)}
	}
	table := NewTable(tracker.IPv4, node("primary"), DefaultConfig, nil, 0)
	for _, c := range []struct {
		values []string
		own    map[tracker.Family]bool
	}{
		{[]string{"primary"}, map[tracker.Family]bool{tracker.IPv4: true, tracker.IPv6: true}},
		{[]string{"192.0.2.1/32"}, map[tracker.Family]bool{tracker.IPv4: true}},
		{[]string{"primary", "2001:db8::/64"}, map[tracker.Family]bool{tracker.IPv4: true}},
		{[]string{"192.0.2.2/32", "2001:db8::1/128"}, map[tracker.Family]bool{tracker.IPv6: true}},
		{nil, nil},
	} {
		n := node(c.values...)
		for _, f := range []tracker.Family{tracker.IPv4, tracker.IPv6} {
			if got := OwnNodePorts(n, f); got != c.own[f] {
				t.Errorf("%v, %v: own %t", c.values, f, got)
			}
		}
		if got, want := table.NeedsRewrite(n), !c.own[tracker.IPv4] || !c.own[tracker.IPv6]; got != want {
			t.Errorf("%v after primary: rewrite %t", c.values, got)
		}
	}
}
