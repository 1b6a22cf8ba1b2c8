package conntrack

import (
	"net/netip"
	"slices"
	"testing"

	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/tracker"
)

// in returns f in the given zone.
func in(zone uint16, f Flow) Flow {
	f.Zone = zone
	return f
}

// TestOnlyFlowsInZonesAreJudged has stale flows in configured and in other zones.
func TestOnlyFlowsInZonesAreJudged(t *testing.T) {
	for _, c := range []struct {
		zones []uint16
		left  []Flow
	}{
		{nil, []Flow{in(7, toOne), in(9, toOne), toTwo}},
		{[]uint16{}, []Flow{in(7, toOne), in(9, toOne), toTwo}},
		{[]uint16{7}, []Flow{toOne, in(9, toOne), toTwo}},
		{[]uint16{0, 9}, []Flow{in(7, toOne), toTwo}},
	} {
		given := slices.Clone(c.zones)
		b := newBedOf(t, Config{Zones: given}, toOne, in(7, toOne), in(9, toOne), toTwo)
		for i := range given {
			given[i] = 99 // the Cleaner keeps its own copy
		}
		both, two := dns("10.0.0.1:53", "10.0.0.2:53"), dns("10.0.0.2:53")
		b.apply(t, true, change(nil, both))
		b.left(t, toOne, in(7, toOne), in(9, toOne), toTwo)
		b.apply(t, false, change(both, two))
		if !slices.Equal(b.table.flows, c.left) {
			t.Errorf("zones %v: left %v, want %v", c.zones, b.table.flows, c.left)
		}
	}
}

// TestNodePortsAnswerAtFurtherAddrs has NodePorts answer at further addresses. A flow that was
// only translated to such an address is stale when the NodePort is gone.
func TestNodePortsAnswerAtFurtherAddrs(t *testing.T) {
	const virtual, host = "169.254.0.252:30053", "192.0.2.1:30053"
	service := func(port uint16, e ...string) *ruleset.Port {
		return service{name: "dns", cluster: "10.96.0.1:53", nodePort: port, endpoints: eps(e...)}.compile(everyAddress())
	}
	both, two, without := service(30053, "10.0.0.1:53", "10.0.0.2:53"), service(30053, "10.0.0.2:53"), service(0, "10.0.0.2:53")
	one := flow("10.9.0.1:1", virtual, "10.0.0.1:53")
	other := flow("10.9.0.1:2", virtual, "10.0.0.2:53")
	handedOn := flow("10.9.0.1:1", host, virtual)
	otherPort := flow("10.9.0.1:3", host, "169.254.0.252:30054")
	blackHole := flow("10.9.0.1:4", virtual, virtual)
	elsewhere := flow("10.9.0.1:5", "169.254.0.253:30053", "10.0.0.9:1")

	b := newBedOf(t, Config{NodePortAddrs: []netip.Addr{addr("::ffff:169.254.0.252"), addr("fd00::252")}})
	b.table.local = []netip.Addr{addr("192.0.2.1")}
	b.apply(t, true, change(nil, both))
	b.table.flows = []Flow{one, other, handedOn, otherPort, blackHole, elsewhere}
	b.apply(t, false, change(both, two))
	b.left(t, other, handedOn, elsewhere)
	b.apply(t, true, change(two, two))
	b.left(t, other, handedOn, elsewhere)
	b.apply(t, false, change(two, without))
	b.left(t, elsewhere)

	if _, err := New(t.Context(), Config{Table: b.table, NodePortAddrs: []netip.Addr{{}}}); err == nil {
		t.Error("an invalid address is accepted")
	}
}

// keep is an extension of a Service whose flows must not be deleted.
type keep struct{}

// Equal implements [tracker.Extension].
func (keep) Equal(o tracker.Extension) bool { return o == keep{} }

// TestFilterSparesFlows spares stale flows by their Service, whether or not the Service still
// exists.
func TestFilterSparesFlows(t *testing.T) {
	both, two := dns("10.0.0.1:53", "10.0.0.2:53"), dns("10.0.0.2:53")
	kept := func(s *ruleset.Port) *ruleset.Port {
		c, p := *s, *s.Spec
		p.Ext = keep{}
		c.Spec = &p
		return &c
	}
	for _, c := range []struct {
		name     string
		old, now *ruleset.Port
		left     []Flow
	}{
		{"endpoint gone", both, two, []Flow{toTwo}},
		{"endpoint gone, kept", kept(both), kept(two), []Flow{toOne, toTwo}},
		{"the Service is kept from now on", both, kept(two), []Flow{toOne, toTwo}},
		{"the Service is kept no longer", kept(both), two, []Flow{toTwo}},
		{"Service gone", both, nil, nil},
		{"Service gone, kept", kept(both), nil, []Flow{toOne, toTwo}},
	} {
		t.Run(c.name, func(t *testing.T) {
			asked := map[Flow]bool{}
			b := newBedOf(t, Config{Filter: func(s *ruleset.Port, f Flow) bool {
				asked[f] = true
				if s.Key != both.Key {
					t.Errorf("asked about %v", s.Key)
				}
				_, k := s.Spec.Ext.(keep)
				return !k
			}})
			b.apply(t, true, change(nil, c.old))
			b.table.flows = []Flow{toOne, toTwo}
			b.apply(t, false, change(c.old, c.now))
			if !slices.Equal(b.table.flows, c.left) {
				t.Errorf("left: %v, want %v", b.table.flows, c.left)
			}
			last := b.infos[len(b.infos)-1]
			if deleted := 2 - len(c.left); last.Stale != deleted || last.Deleted != deleted {
				t.Errorf("%+v, want %d deleted", last, deleted)
			}
			if c.now != nil && len(asked) != 1 {
				t.Errorf("asked about %d flows, not about the stale one", len(asked))
			}
			if b.Pending() {
				t.Error("a spared flow keeps the clean-up pending")
			}
		})
	}
}
