package model

import (
	"net/netip"
	"testing"
	"time"

	"github.com/go-proxier/proxier/nftables/internal/layout"
	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/ruleset/maglev"
	"github.com/go-proxier/proxier/tracker"
)

// TestHandlersAreBounded counts the possible handlers, for all numbers of endpoints and all ways to
// choose one.
func TestHandlersAreBounded(t *testing.T) {
	sizes := map[int]bool{}
	for n := 1; n <= layout.MaxPool+1; n++ {
		sizes[layout.BucketsFor(n)] = true
	}
	found := map[layout.Handler]bool{}
	s := &ruleset.Port{Spec: &tracker.ServicePort{}}
	add := func(c layout.Handler) {
		// A pool of another size differs in its buckets only.
		if c.Buckets == 0 {
			found[c] = true
			return
		}
		for n := range sizes {
			c.Buckets = n
			found[c] = true
		}
		for n := 0; n < maglev.MaxSize; {
			n = maglev.SizeAtLeast(n + 1)
			for _, c.Hash = range []tracker.Hash{tracker.HashSource, tracker.HashSourcePort} {
				c.Buckets = n
				found[c] = true
			}
		}
	}
	s.Selection.Cluster, s.Selection.Local = []*tracker.Endpoint{{}}, []*tracker.Endpoint{{}}
	targets := []ruleset.Target{ruleset.TargetCluster, ruleset.TargetLocal, ruleset.TargetReject, ruleset.TargetDrop}
	for _, target := range targets {
		for _, internal := range targets {
			for m := range ruleset.Masquerade(8) {
				for i := range 2 {
					f := &ruleset.Frontend{Target: target, Internal: internal, Masquerade: m}
					if i != 0 {
						f.Sources = append(f.Sources, netip.MustParsePrefix("10.0.0.0/8"))
					}
					for _, s.Spec.Affinity = range []time.Duration{0, time.Second} {
						h, own := HandlersOf(s, f)
						add(h)
						if own.HasPool() {
							add(own)
						}
					}
				}
			}
		}
	}
	if len(found) != layout.MaxHandlers || layout.MaxHandlers > layout.MaxHandler {
		t.Errorf("%d handlers, expected %d, room for %d", len(found), layout.MaxHandlers, layout.MaxHandler)
	}
}
