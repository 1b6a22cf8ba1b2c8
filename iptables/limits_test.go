//go:build linux

package iptables

import (
	"net/netip"
	"testing"
	"time"

	v1 "k8s.io/api/core/v1"

	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/tracker"
)

// TestAffinityBeyondTheLimitIsRefused renders a Service at the declared limit, which must be
// accepted, and one beyond it.
func TestAffinityBeyondTheLimitIsRefused(t *testing.T) {
	limit := ruleset.LimitsOf(&Backend{}, tracker.IPv4).Affinity
	if limit == 0 {
		t.Fatal("no limit is declared")
	}
	for _, c := range []struct {
		affinity time.Duration
		fails    bool
	}{{limit, false}, {limit + 1, true}} {
		key := tracker.Key{Family: tracker.IPv4}
		key.Namespace, key.Name, key.Protocol = "default", "web", v1.ProtocolTCP
		p := &tracker.ServicePort{Key: key, ClusterIP: netip.MustParseAddr("10.96.0.1"), Port: 80, Affinity: c.affinity}
		s := ruleset.Compile(tracker.PortState{Port: p}, &ruleset.Node{}, tracker.TopologyOptions{})
		_, err := renderService(&settings{family: tracker.IPv4}, nil, s)
		if (err != nil) != c.fails {
			t.Errorf("affinity %v: error %v", c.affinity, err)
		}
	}
}
