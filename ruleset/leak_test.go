package ruleset

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"runtime"
	"testing"

	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/go-proxier/proxier/internal/testing/must"
	"github.com/go-proxier/proxier/internal/testing/usage"
	"github.com/go-proxier/proxier/tracker"
)

// TestDeletedServicesAreFreed creates and deletes thousands of Services with names
// that are used once and that take each other's frontends. One cursor's backend
// fails, and one cursor is attached and detached. Afterwards the engine and the
// cursors must hold no more than before.
func TestDeletedServicesAreFreed(t *testing.T) {
	tr, e := world(t, Config{}, tracker.NodeInfo{Name: "n1"})
	rng := rand.New(rand.NewPCG(1, 2))
	ctx := context.Background()
	good := BackendFunc(func(context.Context, *Delta) error { return nil })
	refusing := true
	bad := BackendFunc(func(_ context.Context, d *Delta) error {
		if !refusing || d.Full {
			return nil
		}
		switch p := (&PartialError{Failed: map[tracker.Key]error{}}); rng.IntN(4) {
		case 0:
			return errors.New("all of it")
		case 1:
			return ErrNeedFull
		case 2:
			for _, c := range d.Changes {
				if rng.IntN(3) == 0 {
					p.Failed[c.Key] = errors.New("this one")
				}
			}
			if len(p.Failed) != 0 {
				return p
			}
		}
		return nil
	})
	always, sometimes := e.Attach("always", good), e.Attach("sometimes", bad)
	const cycles, each = 150, 20
	cycle := func(n int) {
		name := func(i int) string { return fmt.Sprint("svc-", n, "-", i) }
		for i := range each {
			tr.SetService(service(name(i), fmt.Sprintf("10.%d.%d.%d", n>>8, n&255, i+1), func(s *v1.Service) {
				s.Spec.Type = v1.ServiceTypeLoadBalancer
				s.Spec.Ports[0].NodePort = int32(30000 + i%15) // some NodePorts conflict
				s.Spec.ExternalIPs = []string{fmt.Sprint("198.51.100.", i%7)}
				s.Spec.LoadBalancerSourceRanges = []string{"172.16.0.0/12"}
				s.Status.LoadBalancer.Ingress = []v1.LoadBalancerIngress{{IP: fmt.Sprint("203.0.113.", i)}}
			}))
			tr.SetSlice(slice(name(i), fmt.Sprintf("11.%d.%d.%d", n>>8, n&255, i+1), fmt.Sprintf("12.%d.%d.%d", n>>8, n&255, i+1)))
		}
		late := e.Attach("late", good)
		// Failures here are retried below.
		_, _, _ = always.Sync(ctx), sometimes.Sync(ctx), late.Sync(ctx)
		tr.SetNode(tracker.NodeInfo{Name: "n1", Addresses: []netip.Addr{netip.AddrFrom4([4]byte{172, 16, 0, byte(n)})}})
		for i := range each {
			tr.DeleteService(types.NamespacedName{Namespace: "default", Name: name(i)})
			tr.DeleteSlice(types.NamespacedName{Namespace: "default", Name: name(i) + "-n1"})
			if i == each/2 {
				_, _ = always.Sync(ctx), sometimes.Sync(ctx)
			}
		}
		late.Detach()
	}
	retry := func() {
		t.Helper()
		refusing = false
		for _, c := range []*Cursor{always, sometimes} {
			must.Do(t, c.Sync(ctx))
		}
		refusing = true
	}
	for n := range cycles {
		cycle(n)
	}
	retry()
	lengths, before := usage.Lengths(e), usage.Now()
	for n := range cycles {
		cycle(cycles + n)
	}
	retry()
	now := usage.Lengths(e)
	for _, ids := range []string{".slots", ".free", ".cursors[].states"} {
		// The state per ID is small. The number of IDs depends on chance: on how many
		// removals failed at the same time.
		if n := now[ids]; n > 10*each {
			t.Errorf("%s holds %d unused elements", ids, n)
		}
		delete(now, ids)
		delete(lengths, ids)
	}
	for at, n := range now {
		if n != lengths[at] || n > each {
			t.Errorf("%s holds %d elements, held %d before", at, n, lengths[at])
		}
	}
	// Less than 40 bytes for each of the 3,000 Services.
	before.Keep(t, 100<<10)
	runtime.KeepAlive(e)
}
