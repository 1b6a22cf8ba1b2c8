//go:build linux

package nftables

import (
	"context"
	"errors"
	"testing"

	"k8s.io/apimachinery/pkg/types"

	"github.com/go-proxier/proxier/internal/testing/netlab"
	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/tracker"
)

// unprivileged is the size of the largest transaction of a process without privileges, with the
// kernel's default of net.core.wmem_max.
const unprivileged = 2*212992 - 32

// TestSmallSocketBufferSuffices has a process without privileges program many chains, many
// endpoints and a Service that is too large for any transaction.
func TestSmallSocketBufferSuffices(t *testing.T) {
	t.Parallel()
	r := newRig(t, netlab.NewHost(t))
	r.limit = unprivileged
	r.start()
	ctx := context.Background()
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
	for _, full := range []bool{false, false, true, false} {
		if full {
			r.cursor.Resync()
		}
		err := r.cursor.Sync(ctx)
		var partial *ruleset.PartialError
		if !errors.As(err, &partial) || len(partial.Failed) != 1 || !errors.Is(err, ErrTooLarge) {
			t.Fatalf("Sync returned %v", err)
		}
		if r.last.Full != full {
			t.Errorf("full: %t, want %t", r.last.Full, full)
		}
		if v := kernelView(t, r.backend, tracker.IPv4); v["service 10.96.0.212 6 80"] == "" || v["service 10.96.0.211 6 80"] != "" {
			t.Errorf("the other Service: %q, the large one: %q", v["service 10.96.0.212 6 80"], v["service 10.96.0.211 6 80"])
		}
	}
	// A Service that grows beyond the limit in small changes can be programmed. A large
	// change of it fails alone.
	r.tracker.SetSlice(epSlice(210, tracker.IPv4, upTo(6)...))
	r.sync()
	r.verify()
	r.tracker.SetSlice(epSlice(210, tracker.IPv4, upTo(huge)...))
	if err := r.cursor.Sync(ctx); !errors.Is(err, ErrTooLarge) {
		t.Fatalf("Sync returned %v", err)
	}
	r.tracker.DeleteService(types.NamespacedName{Namespace: "ns", Name: "svc-210"})
	r.sync()
	r.verify()
}
