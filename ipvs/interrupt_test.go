//go:build linux

package ipvs

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"testing"
	"time"

	v1 "k8s.io/api/core/v1"

	"github.com/go-proxier/proxier/internal/inet"
	"github.com/go-proxier/proxier/tracker"
)

// testInterruptedDeltasAreCompleted ends deltas between any two of their steps. The next delta
// must complete all changes, and bind exactly the addresses of the Services.
func testInterruptedDeltasAreCompleted(t *testing.T) {
	r := newRig(t, newHost(t), Config{Families: []tracker.Family{tracker.IPv4}})
	reader, err := New(t.Context(), r.config)
	if err != nil {
		t.Fatal(err)
	}
	defer reader.Close()
	addrs := func(n int) []string {
		return []string{fmt.Sprint("198.18.0.", 1+n%2), fmt.Sprint("198.18.1.", 1+n%3), "198.18.2.1"}
	}
	for _, full := range []bool{false, true} {
		every := 1
		if full {
			every = 3 // a full delta takes longer
		}
		for n := 0; ; n += every {
			// Addresses are added, removed, and moved from one Service to another.
			for i := range 3 {
				if (n+i)%3 == 0 {
					r.remove(i)
				} else {
					r.set(svc(i, externalIPs(addrs(n)[i]), over([]v1.Protocol{v1.ProtocolTCP, v1.ProtocolUDP}[(n/3)%2])), i, -1-n%5, 1+n%5)
				}
			}
			if full {
				r.cursor.Resync()
			}
			calls := 0
			err := r.cursor.Sync(pausing{context.Background(), func() error {
				if calls++; calls > n {
					return context.Canceled
				}
				return nil
			}})
			if err != nil && !errors.Is(err, context.Canceled) {
				t.Fatalf("interrupted in step %d: %v", n, err)
			}
			r.sync()
			if err := r.backend.Tend(context.Background(), time.Now().Add(time.Hour)); err != nil {
				t.Fatal(err)
			}
			what := fmt.Sprintf("interrupted in step %d, full %v", n, full)
			reader.device.index = r.backend.device.index
			found, rerr := reader.readFamily(tracker.IPv4, time.Now())
			if rerr != nil {
				t.Fatal(rerr)
			}
			var virtuals []string
			bound := owned[netip.Addr, struct{}]{}
			for _, s := range r.engine.Snapshot().Services {
				if s.Key.Family != tracker.IPv4 {
					continue
				}
				for _, f := range s.Frontends {
					bound.found(f.Addr, struct{}{})
					k := virtualKey{family: tracker.IPv4, proto: inet.Protocol(s.Key.Protocol), at: netip.AddrPortFrom(f.Addr, f.Port)}
					virtuals = append(virtuals, k.String())
					v := found.virtuals[k]
					if v == nil {
						t.Errorf("%s: no virtual server %s", what, k)
						continue
					}
					for _, ep := range s.Pool(f.Target) {
						if v.reals[ep.Addr] != 1 {
							t.Errorf("%s: %s has %v, want %s", what, k, v.reals, ep.Addr)
						}
					}
				}
			}
			if !maps.Equal(found.bound, bound) {
				t.Errorf("%s: bound is %v, want %v", what, slices.Collect(maps.Keys(found.bound)), slices.Collect(maps.Keys(bound)))
			}
			for k := range found.virtuals {
				if !slices.Contains(virtuals, k.String()) {
					t.Errorf("%s: %s is left", what, k)
				}
			}
			if err == nil {
				// The delta had no further step.
				if n < 12 {
					t.Errorf("full %v: only %d steps", full, n)
				}
				t.Logf("full %v: %d steps", full, n)
				break
			}
		}
		if err := r.backend.Check(context.Background()); err != nil {
			t.Error(err)
		}
		r.agree()
	}
}
