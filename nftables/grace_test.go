//go:build linux

package nftables

import (
	"testing"
	"time"

	"github.com/go-proxier/proxier/internal/netlab"
	"github.com/go-proxier/proxier/tracker"
)

// TestEndpointsInGracePeriod counts the endpoints that connections from themselves
// are masqueraded to: one that is gone for a while, and then no more, whatever
// deltas come.
func TestEndpointsInGracePeriod(t *testing.T) {
	t.Parallel()
	r := newRig(t, netlab.NewHost(t))
	r.backend.gracePeriod = time.Hour // but as long as is said below
	later := func(d time.Duration) {  // time passes for all that is remembered
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

	// One in its grace period that comes back is no longer gone.
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
