package nftables

import (
	"context"
	"maps"
	"net/netip"
	"testing"

	v1 "k8s.io/api/core/v1"

	"github.com/go-proxier/proxier/internal/testing/netlab"
	"github.com/go-proxier/proxier/nftables/internal/layout"
	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/ruleset/dataplane"
	"github.com/go-proxier/proxier/tracker"
)

// TestStagesComeAndGo restarts with other stages, and reads the hooks in the kernel after each start.
func TestStagesComeAndGo(t *testing.T) {
	t.Parallel()
	r := newRig(t, netlab.NewHost(t))
	r.tracker.SetService(svc(0))
	r.tracker.SetSlice(epSlice(0, tracker.IPv4, 1))
	usual := map[string]int32{
		layout.ChainNATPrerouting: -100, layout.ChainNATOutput: -100, layout.ChainPreroutingAgain: -99, layout.ChainOutputAgain: -99,
		layout.ChainNATPostrouting: 100, layout.ChainFilterForward: 0, layout.ChainFilterInput: 0, layout.ChainFilterOutput: 0,
	}
	without := func(names ...string) map[string]int32 {
		out := maps.Clone(usual)
		for _, n := range names {
			delete(out, n)
		}
		return out
	}
	for _, tt := range []struct {
		stages Stages
		want   map[string]int32
	}{
		{Stages{}, usual},
		{Stages{NoMasquerade: true}, without(layout.ChainNATPostrouting)},
		{Stages{DestinationNAT: -10, Filter: 20, SourceNAT: -30}, map[string]int32{
			layout.ChainNATPrerouting: -110, layout.ChainNATOutput: -110, layout.ChainPreroutingAgain: -109, layout.ChainOutputAgain: -109,
			layout.ChainNATPostrouting: 70, layout.ChainFilterForward: 20, layout.ChainFilterInput: 20, layout.ChainFilterOutput: 20,
		}},
		{Stages{NoFilter: true}, without(layout.ChainFilterInput)},
		{Stages{NoFilter: true, NoMasquerade: true}, without(layout.ChainFilterInput, layout.ChainNATPostrouting)},
		{Stages{}, usual},
	} {
		r.stages = tt.stages
		r.start()
		r.sync()
		r.verify()
		if _, err := Ready(context.Background(), r.backend.config); err != nil {
			t.Errorf("%+v: %v", tt.stages, err)
		}
		// A destination without an entry makes Lookup read which chains have rules.
		q := dataplane.Query{Packet: ruleset.Packet{To: netip.MustParseAddrPort("10.96.0.99:80"), Protocol: v1.ProtocolTCP}}
		if found, err := Lookup(t.Context(), r.backend.config, q); err != nil || found.Entry {
			t.Errorf("%+v: Lookup of an unused address: %+v, %v", tt.stages, found, err)
		}
		for _, f := range []tracker.Family{tracker.IPv4, tracker.IPv6} {
			chains, err := r.backend.conn.Chains(r.backend.name, f)
			if err != nil {
				t.Fatal(err)
			}
			got := map[string]int32{}
			for name, c := range chains {
				if c.Base != nil {
					got[name] = c.Base.Priority
				}
			}
			if !maps.Equal(got, tt.want) {
				t.Errorf("%+v, %v: hooks %v, want %v", tt.stages, f, got, tt.want)
			}
		}
	}
}
