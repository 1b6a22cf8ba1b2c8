package nftables

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"

	v1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/go-proxier/proxier/internal/testing/backendtest"
	"github.com/go-proxier/proxier/internal/testing/testtime"
	"github.com/go-proxier/proxier/nftables/internal/layout"
	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/tracker"
)

// TestRefusedServicesStayAsTheCursorSays has fewer pools than the Services want, while they take
// external IPs from each other, also in circles. After each Sync the tables must be those of a new
// backend that gets what is in effect according to the cursor, and no IP may be missing that a
// Service held and asks for.
func TestRefusedServicesStayAsTheCursorSays(t *testing.T) {
	t.Parallel()
	worlds := 10
	if testtime.Thorough() {
		worlds = 400
	}
	refused := 0
	for seed := range worlds {
		rng := rand.New(rand.NewPCG(uint64(seed), uint64(*backendtest.Seed)))
		r := newMemoryRig(t)
		r.layout.Plain = 4 + rng.Uint32N(4)
		r.start()
		full := 1
		asks := [8][]string{}
		lost := false
		set := func(i int) {
			asks[i] = nil
			for _, n := range rng.Perm(4)[:rng.IntN(4)] {
				asks[i] = append(asks[i], fmt.Sprint("198.51.100.", n+1))
			}
			r.tracker.SetService(svc(i, func(s *v1.Service) {
				s.CreationTimestamp = metav1.Unix(1+rng.Int64N(6), 0)
				if rng.IntN(3) == 0 {
					nodePort(int32(30000 + i))(s)
					s.Spec.ExternalTrafficPolicy = v1.ServiceExternalTrafficPolicyLocal
				}
				if rng.IntN(5) == 0 {
					sticky(600)(s)
				}
				s.Spec.ExternalIPs = asks[i]
			}))
			r.tracker.SetSlice(epSlice(i, tracker.IPv4, rng.Perm(4)[:rng.IntN(4)]...))
		}
		for step := range 30 {
			for range 1 + rng.IntN(4) {
				if i := rng.IntN(8); rng.IntN(6) == 0 {
					r.tracker.DeleteService(backendtest.ServiceName(i))
					asks[i] = nil
				} else {
					set(i)
				}
			}
			if step != 0 && rng.IntN(10) == 0 {
				r.cursor.Resync()
				full += min(full, 1)
			}
			held, before := holders(r), r.full
			var p *ruleset.PartialError
			err := r.cursor.Sync(t.Context())
			if errors.As(err, &p) {
				refused += len(p.Failed)
				lost = lost || r.full != before
			} else if err != nil {
				t.Fatalf("seed %d, step %d: %v", seed, step, err)
			}
			// A full delta may have no room for what a Service had.
			if lost = lost && err != nil; lost {
				full = 0
				continue
			}
			if d := diffToEffect(r); d != "" {
				t.Fatalf("seed %d, step %d: the tables differ from what is in effect:\n%s", seed, step, d)
			}
			now := holders(r)
			for ip, i := range held {
				if _, ok := now[ip]; !ok && slices.Contains(asks[i], ip) {
					t.Errorf("seed %d, step %d: Service %d lost %s, and no Service has it", seed, step, i, ip)
				}
			}
		}
		if full != 0 && r.full != full {
			t.Errorf("seed %d: %d full deltas, want %d", seed, r.full, full)
		}
	}
	t.Logf("%d Services were refused", refused)
}

// holders returns the number of the Service that has each external IP.
func holders(r *memoryRig) map[string]int {
	out := map[string]int{}
	for i := range 8 {
		s := r.cursor.Port(numberedKey(i, tracker.IPv4))
		for f := 0; s != nil && f < len(s.Frontends); f++ {
			if s.Frontends[f].Kind == ruleset.KindExternalIP {
				out[s.Frontends[f].Addr.String()] = i
			}
		}
	}
	return out
}

func numberedKey(i int, f tracker.Family) tracker.Key {
	return tracker.Key{ServicePortName: tracker.ServicePortName{NamespacedName: backendtest.ServiceName(i), Port: "p", Protocol: v1.ProtocolTCP}, Family: f}
}

// diffToEffect compares the tables with what is in effect according to the cursor.
func diffToEffect(r *memoryRig) (out string) {
	r.Helper()
	for _, f := range []tracker.Family{tracker.IPv4, tracker.IPv6} {
		var ports []*ruleset.Port
		for i := range 8 {
			if s := r.cursor.Port(numberedKey(i, f)); s != nil {
				ports = append(ports, s)
			}
		}
		out += diffViews(kernelView(r, r.backend, f), rulesetView(ports, r.engine.Snapshot().Node, f))
	}
	return out
}

// randomSeeds returns the number of seeds of a test of random changes. One seed in two has small
// transactions.
func randomSeeds() uint64 {
	if testtime.Thorough() {
		return 6
	}
	return 2
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
			for id, tab := range r.memory.Tables {
				for _, s := range everySet() {
					if n := len(elementsIn(tab, s)); s >= layout.ServiceIPs && !s.Verdicts() && !s.Interval() && n != 0 {
						t.Errorf("%v: %d elements of %s are left", id, n, s.Name())
					}
				}
			}
		})
	}
}

// TestServiceThatLosesFrontendToRefusedOneIsChangedLater has a Service that waits, because the Service
// that takes over its address is refused.
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
	if err := r.cursor.Sync(t.Context()); !errors.As(err, &partial) || len(partial.Failed) != 2 {
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
