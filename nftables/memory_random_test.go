package nftables

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"testing"

	v1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/go-proxier/proxier/internal/testing/backendtest"
	"github.com/go-proxier/proxier/internal/testing/testtime"
	"github.com/go-proxier/proxier/nftables/internal/layout"
	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/tracker"
)

// randomSeeds returns the number of seeds of a test of random changes. One seed in two has small
// transactions.
func randomSeeds() uint64 {
	if testtime.Thorough() {
		return 6
	}
	return 2
}

// TestMemoryFollowsRandomChanges applies random changes, full deltas and restarts, and compares the
// tables with those of a cold start after each.
func TestMemoryFollowsRandomChanges(t *testing.T) {
	t.Parallel()
	for seed := range randomSeeds() {
		t.Run(fmt.Sprintf("seed=%d", seed), func(t *testing.T) {
			t.Parallel()
			r := newMemoryRig(t)
			r.memory.limit = []int{0, 50 << 10}[seed%2]
			// A Maglev table does not fit into the smallest transactions.
			changes := backendtest.Changes{Hash: r.memory.limit == 0, Shared: 4}
			rng := rand.New(rand.NewPCG(seed, 2))
			for range 60 {
				for range 1 + rng.IntN(3) {
					changes.Make(r.tracker, r.engine, rng)
				}
				switch rng.IntN(12) {
				case 0:
					r.cursor.Resync()
				case 1:
					r.start()
				}
				r.sync()
				r.verify()
			}
		})
	}
}

// TestRefusedServicesLeaveTablesAsTheyAre has few pools and room for small changes only, so that
// many Services are refused. A table that were not as before after a refusal would not agree with
// the kernel, which would refuse the next transaction.
func TestRefusedServicesLeaveTablesAsTheyAre(t *testing.T) {
	t.Parallel()
	for seed := range randomSeeds() {
		t.Run(fmt.Sprintf("seed=%d", seed), func(t *testing.T) {
			t.Parallel()
			r := newMemoryRig(t)
			r.layout.Plain, r.layout.Sticky = 7, 3
			r.start()
			r.sync()
			r.memory.limit = 16 << 10
			rng := rand.New(rand.NewPCG(seed, 3))
			refused := 0
			for step := range 300 {
				for range 1 + rng.IntN(3) {
					backendtest.Changes{Hash: true}.Make(r.tracker, r.engine, rng)
				}
				err := r.cursor.Sync(t.Context())
				var partial *ruleset.PartialError
				switch {
				case errors.As(err, &partial):
					refused += len(partial.Failed)
				case err != nil:
					t.Fatalf("step %d: %v", step, err)
				}
				if len(r.memory.refusals) != 0 {
					t.Fatalf("step %d: the kernel refused %v", step, r.memory.refusals)
				}
			}
			if refused < 20 {
				t.Errorf("only %d Services were refused", refused)
			}
			r.memory.limit = 0
			for i := range 8 {
				r.tracker.DeleteService(backendtest.ServiceName(i))
			}
			r.sync()
			r.tracker.SetNode(tracker.NodeInfo{Name: backendtest.ThisNode, Zone: "z2"})
			r.sync()
			for id, tab := range r.memory.tables {
				for name, set := range tab.sets {
					if s := set.of; s >= layout.ServiceIPs && !s.Verdicts() && !s.Interval() && len(set.elements) != 0 {
						t.Errorf("%v: %d elements of %s are left", id, len(set.elements), name)
					}
				}
			}
		})
	}
}

// TestServiceThatLosesFrontendToRefusedOneIsChangedLater has a Service whose change is in effect and
// not acknowledged, because the Service that takes over its address is refused.
func TestServiceThatLosesFrontendToRefusedOneIsChangedLater(t *testing.T) {
	t.Parallel()
	r := newMemoryRig(t)
	r.layout.Plain = 1
	r.start()
	set := func(i int, created int64, eps ...int) {
		r.tracker.SetService(svc(i, backendtest.ExternalIPs("198.51.100.1"), func(s *v1.Service) { s.CreationTimestamp = metav1.Unix(created, 0) }))
		r.tracker.SetSlice(epSlice(i, tracker.IPv4, eps...))
	}
	set(0, 100, 1)
	r.sync()
	set(1, 50, 2)
	var partial *ruleset.PartialError
	if err := r.cursor.Sync(t.Context()); !errors.As(err, &partial) || len(partial.Failed) != 1 {
		t.Fatalf("Sync returned %v", err)
	}
	set(0, 100, 3, 4)
	if err := r.cursor.Sync(t.Context()); !errors.As(err, &partial) {
		t.Fatalf("Sync returned %v", err)
	}
	if r.full != 1 || len(r.memory.refusals) != 0 {
		t.Errorf("%d full deltas, refusals %v", r.full, r.memory.refusals)
	}
}
