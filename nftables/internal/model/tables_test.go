package model

import (
	"context"
	"net/netip"
	"testing"
	"time"

	"github.com/go-proxier/proxier/internal/nfnl"
	"github.com/go-proxier/proxier/internal/nft"
	"github.com/go-proxier/proxier/internal/testing/backendtest"
	"github.com/go-proxier/proxier/internal/testing/must"
	"github.com/go-proxier/proxier/nftables/internal/layout"
	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/tracker"
)

// TestInterfacesAreAddedAndRemoved follows the interfaces of the fast path.
func TestInterfacesAreAddedAndRemoved(t *testing.T) {
	c := DefaultConfig
	c.FastPath = true
	tab := NewTable(tracker.IPv4, &ruleset.Node{}, c, nil, 0)
	for _, step := range []struct {
		links        map[string]int
		add, removed int
	}{
		{map[string]int{"a": 1, "b": 2}, 2, 0}, {map[string]int{"b": 2, "c": 3}, 1, 1}, {map[string]int{"b": 2, "c": 3}, 0, 0},
	} {
		tx := &Tx{}
		tab.Intervals.SetInterfaces(step.links, tx)
		add, removed := 0, 0
		for _, e := range tx.Edits {
			if e.Deletion {
				removed++
			} else {
				add++
			}
		}
		if add != step.add || removed != step.removed {
			t.Errorf("%v: %d added, %d removed", step.links, add, removed)
		}
		tab.KeepInterfaces(step.links)
		if n := tab.Room.Count(layout.FastPathInterfaces); n != len(step.links) {
			t.Errorf("%d interfaces", n)
		}
	}
}

// TestClientsOfAnotherDataPlaneAreRecalled gives a new Service the clients that another data plane
// remembers. Those of another family, and those whose time is up, are left out.
func TestClientsOfAnotherDataPlaneAreRecalled(t *testing.T) {
	p := backendtest.NewNode(t, tracker.Config{})
	p.Tracker.SetService(backendtest.Numbered(0, backendtest.Affinity(600)))
	p.Tracker.SetSlice(backendtest.NumberedSlice(0, tracker.IPv4, 1, 2))
	var change ruleset.Change
	c := p.Engine.Attach("capture", ruleset.BackendFunc(func(_ context.Context, d *ruleset.Delta) error {
		for _, ch := range d.Changes {
			if ch.Key.Family == tracker.IPv4 {
				change = ch
			}
		}
		return nil
	}))
	must.Do(t, c.Sync(t.Context()))
	tab := NewTable(tracker.IPv4, p.Engine.Snapshot().Node, DefaultConfig, nil, 0)
	calls := map[netip.AddrPort]int{}
	tab.Affinity.Recall(func(_ tracker.Key, ep netip.AddrPort) map[netip.Addr]time.Duration {
		calls[ep]++
		return map[netip.Addr]time.Duration{
			netip.MustParseAddr("192.0.2.1"): 100 * time.Second, netip.MustParseAddr("192.0.2.2"): time.Hour, netip.MustParseAddr("fd00::1"): 0,
		}
	})
	tx := &Tx{}
	must.Do(t, tab.Change(&change, tx))
	clients := 0
	for _, e := range tx.Edits {
		if e.Set == layout.StickyClients {
			clients++
			e.Each(func(e nft.Element) {
				if nfnl.Uint64(e.Timeout) != 600_000 || nfnl.Uint64(e.Expiration) != 500_000 {
					t.Errorf("timeout %x, %x left", e.Timeout, e.Expiration)
				}
			})
		}
	}
	if clients != 2 || len(calls) != 2 || calls[netip.MustParseAddrPort("10.244.0.1:8080")] != 1 {
		t.Errorf("%d clients, calls %v", clients, calls)
	}
}
