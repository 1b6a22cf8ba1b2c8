package nftables

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"strings"
	"testing"

	v1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/go-proxier/proxier/internal/testing/backendtest"
	"github.com/go-proxier/proxier/internal/testing/testtime"
	"github.com/go-proxier/proxier/nftables/internal/layout"
	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/tracker"
)

// TestServicesWithoutPoolsHoldUpNoOthers has fewer pools than the Services want, while they take external IPs from
// each other, also in circles. After each Sync the tables must have all Services, without a further full delta.
// Connections to the Services that Sync names may be rejected, where there is no pool.
func TestServicesWithoutPoolsHoldUpNoOthers(t *testing.T) {
	t.Parallel()
	worlds := 10
	if testtime.Thorough() {
		worlds = 400
	}
	failed, rejected := 0, 0
	for seed := range worlds {
		rng := rand.New(rand.NewPCG(uint64(seed), uint64(*backendtest.Seed)))
		r := newMemoryRig(t)
		r.layout.Plain = 4 + rng.Uint32N(4)
		r.start()
		full := 1
		for step := range 30 {
			for range 1 + rng.IntN(4) {
				i := rng.IntN(8)
				if rng.IntN(6) == 0 {
					r.tracker.DeleteService(backendtest.ServiceName(i))
					continue
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
					for _, n := range rng.Perm(4)[:rng.IntN(4)] {
						s.Spec.ExternalIPs = append(s.Spec.ExternalIPs, fmt.Sprint("198.51.100.", n+1))
					}
				}))
				r.tracker.SetSlice(epSlice(i, tracker.IPv4, rng.Perm(4)[:rng.IntN(4)]...))
			}
			if step != 0 && rng.IntN(10) == 0 {
				r.cursor.Resync()
				full++
			}
			p := &ruleset.PartialError{}
			if err := r.cursor.Sync(t.Context()); err != nil && !errors.As(err, &p) {
				t.Fatalf("seed %d, step %d: %v", seed, step, err)
			}
			failed += len(p.Failed)
			now := r.engine.Snapshot()
			for _, f := range []tracker.Family{tracker.IPv4, tracker.IPv6} {
				have, want := kernelView(t, r.backend, f), rulesetView(now.Ports, now.Node, f)
				for k := range p.Failed {
					name := k.ServicePortName.String() + " "
					for at := range have {
						if k.Family == f && have[at] == name+layout.ChainNoEndpoints+" []" && strings.HasPrefix(want[at], name) {
							have[at] = want[at]
							rejected++
						}
					}
				}
				if d := diffViews(have, want); d != "" {
					t.Fatalf("seed %d, step %d: the tables differ from the ruleset, %v:\n%s", seed, step, p, d)
				}
			}
		}
		if r.full != full || len(r.memory.refusals) != 0 {
			t.Errorf("seed %d: %d full deltas, want %d, refusals %v", seed, r.full, full, r.memory.refusals)
		}
	}
	if t.Logf("%d Services failed, %d frontends rejected", failed, rejected); failed == 0 || rejected == 0 {
		t.Error("there were pools for all Services")
	}
}

// randomSeeds returns the number of seeds of a test of random changes. One seed in two has small
// transactions.
func randomSeeds() uint64 {
	if testtime.Thorough() {
		return 6
	}
	return 2
}

// TestSmallTransactionsHaveAllServices has room in a transaction for small changes only. Larger ones take a staging
// table. The kernel must accept all transactions.
func TestSmallTransactionsHaveAllServices(t *testing.T) {
	t.Parallel()
	for seed := range randomSeeds() {
		t.Run(fmt.Sprintf("seed=%d", seed), func(t *testing.T) {
			t.Parallel()
			r := newMemoryRig(t)
			r.sync()
			r.memory.limit = 24 << 10
			rng := rand.New(rand.NewPCG(seed, 3))
			for range 60 {
				for range 1 + rng.IntN(3) {
					backendtest.Changes{Hash: true}.Make(r.tracker, r.engine, rng)
				}
				r.sync()
				r.verify()
			}
			if len(r.memory.refusals) != 0 || r.full < 10 {
				t.Errorf("the kernel refused %v, with %d full deltas", r.memory.refusals, r.full)
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

// TestServicesExchangeManyFrontends has Services that exchange external IPs in a circle, each change beyond half of a
// transaction's room.
func TestServicesExchangeManyFrontends(t *testing.T) {
	t.Parallel()
	r := newMemoryRig(t)
	r.sync()
	r.memory.limit = 24 << 10
	for round := range 4 {
		for i := range 3 {
			r.tracker.SetService(svc(i, func(s *v1.Service) {
				for n := range 100 {
					s.Spec.ExternalIPs = append(s.Spec.ExternalIPs, fmt.Sprintf("198.51.%d.%d", (i+round)%3, n+1))
				}
			}))
			r.tracker.SetSlice(epSlice(i, tracker.IPv4, upTo(50+round)...))
		}
		r.sync()
		r.verify()
	}
	if len(r.memory.refusals) != 0 {
		t.Errorf("the kernel refused %v", r.memory.refusals)
	}
}
