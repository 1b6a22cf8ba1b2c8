//go:build linux

package nftables

import (
	"maps"
	"testing"

	"github.com/go-proxier/proxier/internal/netlab"
	"github.com/go-proxier/proxier/tracker"
)

// TestSmallPoolsNeedNoNewChain gives a Service each number of endpoints up to exactBuckets. No
// change may add a chain that looks up endpoints, because the kernel would walk through the map of
// all endpoints.
func TestSmallPoolsNeedNoNewChain(t *testing.T) {
	t.Parallel()
	r := newRig(t, netlab.NewHost(t))
	r.tracker.SetService(svc(1))
	r.tracker.SetSlice(epSlice(1, tracker.IPv4, 1, 2))
	r.sync()
	ipv4 := r.backend.table(tracker.IPv4)
	pools := func() map[string]int {
		out := maps.Clone(ipv4.chains)
		maps.DeleteFunc(out, func(name string, _ int) bool { return len(name) < 5 || name[:5] != "pool-" })
		return out
	}
	before := pools()
	if len(before) != exactBuckets {
		t.Errorf("%d chains for pools at first, want %d", len(before), exactBuckets)
	}
	for n := 1; n <= exactBuckets; n++ {
		r.tracker.SetSlice(epSlice(1, tracker.IPv4, upTo(n)...))
		r.sync()
		if now := pools(); !maps.Equal(now, before) {
			t.Fatalf("%d endpoints: chains %v, before %v", n, now, before)
		}
	}
	r.verify()
	if r.backend.table(tracker.IPv4) != ipv4 {
		t.Error("the change was a full delta")
	}
}
