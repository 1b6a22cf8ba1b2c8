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
			held := holders(r)
			var p *ruleset.PartialError
			err := r.cursor.Sync(t.Context())
			if errors.As(err, &p) {
				refused += len(p.Failed)
				for _, err := range p.Failed {
					lost = lost || !errors.Is(err, ruleset.ErrRefused)
				}
			} else if err != nil {
				t.Fatalf("seed %d, step %d: %v", seed, step, err)
			}
			// A full delta may have no room for what a Service had.
			if lost = lost && err != nil; lost {
				full = 0
				continue
			}
			if got, want := r.memory.describe(), inEffect(r); got != want {
				t.Fatalf("seed %d, step %d: the tables differ from what is in effect: %s", seed, step, backendtest.FirstDifference(got, want))
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

// inEffect describes the tables of a new backend with room for everything that gets what is in
// effect according to the cursor.
func inEffect(r *memoryRig) string {
	r.Helper()
	m := newMemory()
	d := &ruleset.Delta{Full: true, Node: r.engine.Snapshot().Node}
	for i := range 8 {
		for _, f := range []tracker.Family{tracker.IPv4, tracker.IPv6} {
			if s := r.cursor.Port(numberedKey(i, f)); s != nil {
				d.Changes = append(d.Changes, ruleset.Change{Key: s.Key, New: s, Fields: ruleset.FieldAll})
			}
		}
	}
	slices.SortFunc(d.Changes, func(a, b ruleset.Change) int { return a.Key.Compare(b.Key) })
	b := m.backend(r, r.config, withoutGrace)
	if err := b.Apply(r.Context(), d); err != nil {
		r.Fatal(err)
	}
	return m.describe()
}
