package driver_test

import (
	"net/netip"
	"testing"

	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/ruleset/driver"
	"github.com/go-proxier/proxier/tracker"
)

// TestEmptyPoolsAreYieldedOnRequest has a Service without endpoints, whose traffic policy concerns one pool.
func TestEmptyPoolsAreYieldedOnRequest(t *testing.T) {
	key := tracker.Key{Family: tracker.IPv4}
	s := ruleset.Compile(tracker.PortState{Port: &tracker.ServicePort{Key: key, ClusterIP: netip.MustParseAddr("10.96.0.1"), Port: 80}}, &ruleset.Node{})
	for empty, want := range map[bool]int{false: 0, true: 1} {
		n := 0
		for pool, eps := range driver.Pools(s, empty) {
			if n++; pool != (driver.Pool{Service: key, Target: ruleset.TargetCluster}) || len(eps) != 0 {
				t.Errorf("pool %v has endpoints %v", pool, eps)
			}
		}
		if n != want {
			t.Errorf("empty=%v: %d pools, want %d", empty, n, want)
		}
	}
}
