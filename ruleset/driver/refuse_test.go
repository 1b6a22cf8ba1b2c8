package driver_test

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"testing"

	v1 "k8s.io/api/core/v1"

	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/ruleset/conformance"
	"github.com/go-proxier/proxier/tracker"
)

// change makes a random change to one of a few Services, which share external addresses.
func (w *world) change(r *rand.Rand) {
	i := r.IntN(4)
	switch n := fmt.Sprint("s", i); r.IntN(5) {
	case 0:
		w.tracker.DeleteService(name(n))
	case 1, 2:
		s := service(n, fmt.Sprint("10.96.0.", i+1))
		s.Spec.Type = v1.ServiceTypeNodePort
		s.Spec.ExternalIPs = []string{fmt.Sprint("203.0.113.", r.IntN(2))}
		s.Spec.ExternalTrafficPolicy = []v1.ServiceExternalTrafficPolicy{"Local", "Cluster"}[r.IntN(2)]
		s.Spec.Ports[0].Port, s.Spec.Ports[0].NodePort = int32(80+r.IntN(2)), int32(30080+r.IntN(3))
		w.tracker.SetService(s)
	default:
		s := slice(n)
		for e := range 4 {
			if r.IntN(2) == 0 {
				node := []string{"here", "there"}[e%2]
				s.Endpoints = append(s.Endpoints, slice("", fmt.Sprint("10.0.0.", e+1)).Endpoints...)
				s.Endpoints[len(s.Endpoints)-1].NodeName = &node
			}
		}
		w.tracker.SetSlice(s)
	}
}

// agree compares the plane with what it must have if these Services are in effect.
func (w *world) agree(services []*ruleset.Port) {
	w.t.Helper()
	want := newPlane(w.t, conformance.SimEnv{Fail: func() error { return nil }, Look: func() {}})
	want.variant = w.variant
	d := &ruleset.Delta{Full: true, Node: w.node}
	for _, s := range services {
		d.Changes = append(d.Changes, ruleset.Change{Key: s.Key, New: s, Fields: ruleset.FieldAll})
	}
	want.variant.unfit = false
	if err := want.driver().Apply(w.t.Context(), d); err != nil {
		w.t.Fatal(err)
	}
	if got, want := w.dump(), want.dump(); got != want {
		w.t.Errorf("the plane has\n%s\nand in effect is\n%s", got, want)
	}
}

// watched is a backend that records which Services may be half written.
type watched struct {
	*world
	ruleset.Backend
}

func (b watched) Limits(f tracker.Family) ruleset.Limits { return ruleset.LimitsOf(b.Backend, f) }

func (b watched) Apply(ctx context.Context, d *ruleset.Delta) error {
	err := b.Backend.Apply(ctx, d)
	failed := map[tracker.Key]error{}
	if partial := (*ruleset.PartialError)(nil); errors.As(err, &partial) {
		failed = partial.Failed
	}
	stays := map[tracker.Key]bool{}
	for range d.Changes { // a chain of Services that lose frontends
		for _, c := range d.Changes {
			half := failed[c.Key] != nil && (len(c.Attempted) != 0 || !errors.Is(failed[c.Key], ruleset.ErrRefused))
			stay := failed[c.Key] != nil
			for _, to := range c.LostFrontends() {
				half, stay = half || b.half[to], stay || stays[to]
			}
			if stays[c.Key] = stay; half {
				b.half[c.Key] = true
			}
		}
	}
	for _, c := range d.Changes {
		if !stays[c.Key] {
			delete(b.half, c.Key)
		}
	}
	return err
}

// TestRefusedServiceStaysAsAcknowledged refuses random writes and Services. Unless something of a
// Service was written, the plane has what the Cursor takes for acknowledged.
func TestRefusedServiceStaysAsAcknowledged(t *testing.T) {
	checked, refused := 0, 0
	for seed := range uint64(400) {
		r := rand.New(rand.NewPCG(seed, 4))
		w := newWorld(t, seed%2 == 0)
		w.variant = variant{
			empty: seed%2 == 0, byService: seed/2%2 == 0, batches: seed/4%2 == 0, replace: seed/8%2 == 0,
			some: seed/16%2 == 0, unfit: seed/32%2 == 0, refuses: true,
		}
		w.start(t, w.variant.empty)
		rate := 6
		w.env.Fail = func() error {
			if rate != 0 && !w.deleting && r.IntN(rate) == 0 {
				return errRefused
			}
			return nil
		}
		for step := range 40 {
			w.change(r)
			if r.IntN(10) == 0 {
				w.cursor.Resync()
			}
			rate = 6
			if step%8 == 7 {
				rate = 0
			}
			err := w.cursor.Sync(t.Context())
			if partial := (*ruleset.PartialError)(nil); errors.As(err, &partial) {
				refused += len(partial.Failed)
			} else if err != nil {
				t.Fatal(err)
			}
			if len(w.half) == 0 {
				var now []*ruleset.Port
				for i := range 4 {
					k := tracker.Key{ServicePortName: tracker.ServicePortName{NamespacedName: name(fmt.Sprint("s", i)), Protocol: v1.ProtocolTCP}, Family: tracker.IPv4}
					if s := w.cursor.Port(k); s != nil {
						now = append(now, s)
					}
				}
				w.agree(now)
				checked++
			}
			if t.Failed() {
				t.Fatalf("seed %d, step %d, %+v: %v", seed, step, w.variant, err)
			}
		}
	}
	if checked < 8000 || refused < 1000 {
		t.Errorf("only %d checks and %d refused Services", checked, refused)
	}
}
