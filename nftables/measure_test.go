//go:build linux

package nftables

import (
	"testing"

	"k8s.io/apimachinery/pkg/types"

	"github.com/go-proxier/proxier/internal/testing/netlab"
	"github.com/go-proxier/proxier/tracker"
)

// unprivileged is the size of the largest transaction of a process without privileges, with the
// kernel's default of net.core.wmem_max.
const unprivileged = 2*212992 - 32

// TestSmallSocketBufferSuffices has a process without privileges program many chains, many
// endpoints and a Service that is too large for a transaction.
func TestSmallSocketBufferSuffices(t *testing.T) {
	t.Parallel()
	r := newRig(t, netlab.NewHost(t))
	r.limit = unprivileged
	r.start()
	for i := range 120 {
		r.tracker.SetService(svc(i, sticky(int32(1000+i))))
		for _, f := range []tracker.Family{tracker.IPv4, tracker.IPv6} {
			r.tracker.SetSlice(epSlice(i, f, upTo(10+i%7)...))
		}
	}
	for range 3 { // the first tables, a staging table, and the first name again
		r.cursor.Resync()
		r.sync()
		r.verify()
		r.start()
	}
	r.sync()
	for i := range 120 { // in one delta
		r.tracker.SetService(svc(i, sticky(int32(2000+i))))
		r.tracker.SetSlice(epSlice(i, tracker.IPv4, upTo(19)...))
	}
	r.sync()
	r.verify()
	if r.last.Full {
		t.Error("a large change was a full delta")
	}

	const huge = 10000
	r.tracker.SetService(svc(210))
	r.tracker.SetSlice(epSlice(210, tracker.IPv4, upTo(huge)...))
	r.tracker.SetService(svc(211))
	r.tracker.SetSlice(epSlice(211, tracker.IPv4, upTo(7)...))
	r.sync() // by a staging table
	r.verify()
	if !r.last.Full {
		t.Error("a Service that does not fit into a transaction was not a full delta")
	}
	r.tracker.SetSlice(epSlice(211, tracker.IPv4, upTo(8)...))
	r.sync()
	r.verify()
	if r.last.Full {
		t.Error("a small change beside a large Service was a full delta")
	}
	r.tracker.SetService(svc(210, sticky(60))) // a change of every endpoint
	r.sync()
	r.verify()
	if err := Cleanup(t.Context(), r.backend.config); err != nil { // a reboot
		t.Fatal(err)
	}
	r.start()
	r.sync()
	r.verify()
	r.tracker.DeleteService(types.NamespacedName{Namespace: "ns", Name: "svc-210"})
	r.sync()
	r.verify()
}
