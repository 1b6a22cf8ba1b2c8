//go:build linux

package nftables

import (
	"net/netip"
	"testing"

	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/ruleset/maglev"
	"github.com/go-proxier/proxier/tracker"
)

// TestHandlersAreBounded counts the possible handlers, for all numbers of endpoints and all ways to
// choose one.
func TestHandlersAreBounded(t *testing.T) {
	sizes := map[int]bool{}
	for n := 1; n <= maxPool+1; n++ {
		sizes[bucketsFor(n)] = true
	}
	found := map[handler]bool{}
	s := &ruleset.Service{Port: &tracker.ServicePort{}}
	add := func(c handler) {
		// A pool of another size differs in its buckets only.
		if c.buckets == 0 {
			found[c] = true
			return
		}
		for n := range sizes {
			c.buckets = n
			found[c] = true
		}
		for _, n := range maglev.Sizes() {
			for _, c.hash = range []tracker.Hash{tracker.HashSource, tracker.HashSourcePort} {
				c.buckets = n
				found[c] = true
			}
		}
	}
	s.Selection.Cluster, s.Selection.Local = make([]*tracker.Endpoint, 1), make([]*tracker.Endpoint, 1)
	targets := []ruleset.Target{ruleset.ToCluster, ruleset.ToLocal, ruleset.Reject, ruleset.Drop}
	for _, target := range targets {
		for _, internal := range targets {
			for m := range ruleset.Masquerade(8) {
				for _, sources := range []string{"", "10.0.0.0/8"} {
					f := &ruleset.Frontend{Target: target, Internal: internal, Masquerade: m}
					if sources != "" {
						f.Sources = append(f.Sources, netip.MustParsePrefix(sources))
					}
					for _, affinity := range []bool{false, true} {
						sticky := stickyTargets{ruleset.ToCluster: affinity, ruleset.ToLocal: affinity}
						add(handlerOf(s, f, sticky))
						if hasInternalHandler(f) {
							add(poolHandler(s, ruleset.ToCluster, sticky))
						}
					}
				}
			}
		}
	}
	if len(found) != maxHandlers || maxHandlers > maxHandler {
		t.Errorf("%d handlers, expected %d, room for %d", len(found), maxHandlers, maxHandler)
	}
}
