package nftables

import (
	"errors"
	"net/netip"
	"strings"
	"testing"

	v1 "k8s.io/api/core/v1"

	"github.com/go-proxier/proxier/internal/testing/backendtest"
	"github.com/go-proxier/proxier/internal/testing/must"
	"github.com/go-proxier/proxier/nftables/fake"
	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/tracker"
)

// TestStagesAreLeftOut asks tables without some stages where packets go.
func TestStagesAreLeftOut(t *testing.T) {
	t.Parallel()
	p := backendtest.NewNode(t, tracker.Config{})
	p.Tracker.SetService(svc(0))
	p.Tracker.SetSlice(epSlice(0, tracker.IPv4, 1))
	packet := func(to string) ruleset.Packet {
		return ruleset.Packet{From: netip.MustParseAddr("192.0.2.9"), InInterface: "eth0", To: netip.MustParseAddrPort(to), Protocol: v1.ProtocolTCP}
	}
	for _, tt := range []struct {
		stages     Stages
		masquerade bool
		closed     ruleset.Action // 0 if the packet passes
	}{
		{Stages{}, true, ruleset.ActionReject},
		{Stages{DestinationNAT: -7, Filter: 5, SourceNAT: 97}, true, ruleset.ActionReject},
		{Stages{NoMasquerade: true}, false, ruleset.ActionReject},
		{Stages{NoFilter: true}, true, 0},
		{Stages{NoFilter: true, NoMasquerade: true}, false, 0},
	} {
		tx := must.Get(newRenderer(t, Config{Stages: tt.stages}).Render(p.Engine.Snapshot().Delta()))(t)
		tables := fake.New()
		must.Do(t, tables.Load(tx.String()))
		if out := tables.Handle(packet("10.96.0.1:80")); len(out.Endpoints) != 1 || out.Endpoints[0].Masquerade != tt.masquerade {
			t.Errorf("%+v: a Service: %+v", tt.stages, out)
		}
		if out := tables.Handle(packet("10.96.0.1:81")); out.Action != tt.closed {
			t.Errorf("%+v: a closed port: %+v", tt.stages, out)
		}
		if !strings.Contains(tx.String(), "meta mark set meta mark | 0x00004000") {
			t.Errorf("%+v: no rule marks what must be masqueraded:\n%s", tt.stages, tx)
		}
	}
	for _, s := range []Stages{{DestinationNAT: -98}, {Filter: 98}, {SourceNAT: -1000}} {
		if _, err := NewRenderer(Config{Stages: s}, tracker.IPv4); !errors.Is(err, ruleset.ErrConfig) {
			t.Errorf("%+v: error %v", s, err)
		}
	}
}
