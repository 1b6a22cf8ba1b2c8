package model

import (
	"testing"

	"github.com/go-proxier/proxier/nftables/internal/layout"
	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/tracker"
)

// TestRoomIsKeptUpToABound compares the sizes of sets with those of the table that is replaced.
func TestRoomIsKeptUpToABound(t *testing.T) {
	tab := NewTable(tracker.IPv4, &ruleset.Node{}, DefaultConfig, nil, 0)
	tab.Room.KeepSizes(func(s layout.Set) int {
		switch s {
		case layout.Endpoints:
			return 1 << 16
		case layout.ClusterIPs:
			return 16
		case layout.StickyEndpoints, layout.Hairpin, layout.NodePortIPs, layout.StickyClients, layout.Allowed(24):
			return 1 << 24
		}
		return 0
	})
	for s, want := range map[layout.Set]int{
		layout.Endpoints: 1 << 16, layout.ClusterIPs: SizeFor(0), layout.StickyEndpoints: keptRoom, layout.Hairpin: keptHairpin,
		layout.NodePorts: SizeFor(0), layout.NodePortIPs: 0, layout.StickyClients: DefaultConfig.Clients, layout.Allowed(24): 0,
	} {
		if got := tab.Room.Size(s); got != want {
			t.Errorf("set %s has room for %d elements, want %d", s.Name(), got, want)
		}
	}
}
