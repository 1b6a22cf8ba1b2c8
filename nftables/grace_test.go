package nftables

import (
	"testing"
	"testing/synctest"
	"time"

	"github.com/go-proxier/proxier/nftables/internal/layout"
	"github.com/go-proxier/proxier/tracker"
)

// TestRemovedEndpointsHaveGracePeriod counts the endpoints whose connections to themselves are
// masqueraded. A removed endpoint stays for its grace period and no longer, whatever deltas
// follow.
func TestRemovedEndpointsHaveGracePeriod(t *testing.T) { synctest.Test(t, graceful) }

func graceful(t *testing.T) {
	r := newMemoryRig(t)
	r.layout.GracePeriod = time.Hour
	r.start()
	count := func(what string, want int) {
		t.Helper()
		if n := len(elementsIn(r.memory.inUse(tracker.IPv4), layout.Hairpin)); n != want {
			t.Errorf("%s: %d endpoints, want %d", what, n, want)
		}
	}
	endpoints := func(eps ...int) { r.tracker.SetSlice(epSlice(0, tracker.IPv4, eps...)) }
	r.tracker.SetService(svc(0))
	endpoints(2, 4, 6)
	r.sync()
	count("at first", 3)

	for i := range 5 { // a change, and full deltas only
		before := 8 + 2*i
		endpoints(2, 4, before)
		r.cursor.Resync()
		r.sync()
		count("a full delta", 4)
		r.cursor.Resync()
		r.sync()
		count("another immediately", 4)
		time.Sleep(2 * time.Hour)
		r.cursor.Resync()
		r.sync()
		count("another later", 3)
	}

	endpoints(2, 4)
	r.sync()
	count("a change", 3)
	r.backend.discard(time.Now())
	r.cursor.Resync()
	r.sync()
	count("a full delta immediately", 3)
	time.Sleep(2 * time.Hour)
	endpoints(2, 4, 40)
	r.sync()
	count("a change later", 3)

	// An endpoint that comes back during its grace period is no longer removed.
	endpoints(2, 4)
	r.sync()
	endpoints(2, 4, 40)
	r.sync()
	time.Sleep(2 * time.Hour)
	r.cursor.Resync()
	r.sync()
	endpoints(2, 4)
	r.cursor.Resync()
	r.sync()
	count("back and gone again", 3)
}
