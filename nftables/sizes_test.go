package nftables

import (
	"maps"
	"strings"
	"testing"

	"github.com/go-proxier/proxier/nftables/internal/layout"
	"github.com/go-proxier/proxier/tracker"
)

// TestSmallPoolsNeedNoNewChain gives a Service each number of endpoints up to layout.ExactBuckets. No
// change may add a chain that looks up endpoints, because the kernel would walk through the map of
// all endpoints.
func TestSmallPoolsNeedNoNewChain(t *testing.T) {
	t.Parallel()
	r := newMemoryRig(t)
	r.tracker.SetService(svc(1))
	r.tracker.SetSlice(epSlice(1, tracker.IPv4, 1, 2))
	r.sync()
	ipv4 := r.backend.tables.Table(tracker.IPv4)
	pools := func() map[string]bool {
		out := map[string]bool{}
		for name := range ipv4.Chains() {
			if strings.HasPrefix(name, "pool-") {
				out[name] = true
			}
		}
		return out
	}
	before := pools()
	if len(before) != layout.ExactBuckets {
		t.Errorf("%d chains for pools at first, want %d", len(before), layout.ExactBuckets)
	}
	for n := 1; n <= layout.ExactBuckets; n++ {
		r.tracker.SetSlice(epSlice(1, tracker.IPv4, upTo(n)...))
		r.sync()
		if now := pools(); !maps.Equal(now, before) {
			t.Fatalf("%d endpoints: chains %v, before %v", n, now, before)
		}
	}
	r.verify()
	if r.backend.tables.Table(tracker.IPv4) != ipv4 {
		t.Error("the change was a full delta")
	}
}
