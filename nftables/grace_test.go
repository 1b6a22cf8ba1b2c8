//go:build linux

package nftables

import (
	"testing"
	"time"

	"github.com/go-proxier/proxier/internal/netlab"
	"github.com/go-proxier/proxier/tracker"
)

// TestRemovedEndpointsHaveGracePeriod counts the endpoints whose connections to themselves are
// masqueraded. A removed endpoint stays for its grace period and no longer, whatever deltas
// follow.
func TestRemovedEndpointsHaveGracePeriod(t *testing.T) {
	t.Parallel()
	r := newRig(t, netlab.NewHost(t))
	r.backend.gracePeriod = time.Hour
	later := func(d time.Duration) { // moves all grace entries into the past
		r.Helper()
		for _, tab := range r.backend.tables {
			for i := range tab.hairpin.grace {
				tab.hairpin.grace[i].since = tab.hairpin.grace[i].since.Add(-d)
			}
		}
	}
	count := func(what string, want int) {
		t.Helper()
		n := 0
		if err := r.backend.elements(r.backend.name, tracker.IPv4, setHairpin, func(kernelElement) { n++ }); err != nil {
			t.Fatal(err)
		}
		if n != want {
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
		count("another at once", 4)
		later(2 * time.Hour)
		r.cursor.Resync()
		r.sync()
		count("another later", 3)
	}

	endpoints(2, 4)
	r.sync()
	count("a change", 3)
	r.backend.discardModel(time.Now())
	r.cursor.Resync()
	r.sync()
	count("a full delta at once", 3)
	later(2 * time.Hour)
	endpoints(2, 4, 40)
	r.sync()
	count("a change later", 3)

	// An endpoint that comes back during its grace period is no longer removed.
	endpoints(2, 4)
	r.sync()
	endpoints(2, 4, 40)
	r.sync()
	later(2 * time.Hour)
	r.cursor.Resync()
	r.sync()
	endpoints(2, 4)
	r.cursor.Resync()
	r.sync()
	count("back and gone again", 3)
}
