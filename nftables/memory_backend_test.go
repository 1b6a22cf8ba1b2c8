package nftables

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"strings"
	"testing"
	"time"

	v1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/go-proxier/proxier/internal/testing/backendtest"
	"github.com/go-proxier/proxier/internal/testing/must"
	"github.com/go-proxier/proxier/nftables/internal/layout"
	"github.com/go-proxier/proxier/nftables/internal/memory"
	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/ruleset/dataplane"
	"github.com/go-proxier/proxier/tracker"
)

// chainOf returns the handling of a Service's cluster IP, without numbers.
func (r *memoryRig) chainOf(i int) string {
	return kernelView(r, r.backend, tracker.IPv4)[fmt.Sprintf("service 10.96.0.%d 6 80", i+1)]
}

// TestHiddenSuccessIsCorrected hides from the cursor that a change is in effect, and then changes the
// Service again. Old is not what the tables have.
func TestHiddenSuccessIsCorrected(t *testing.T) {
	t.Parallel()
	r := newMemoryRig(t)
	lost := false
	later := errors.New("a later step failed")
	cursor := r.engine.Attach("wrapper", ruleset.BackendFunc(func(ctx context.Context, d *ruleset.Delta) error {
		err := r.apply(ctx, d)
		if err == nil && lost {
			err = later
		}
		return err
	}))
	sync := func(want error) {
		t.Helper()
		if err := cursor.Sync(t.Context()); !errors.Is(err, want) {
			t.Fatalf("%v, want %v", err, want)
		}
	}
	r.tracker.SetService(svc(0, backendtest.NodePort(30000)))
	r.tracker.SetSlice(epSlice(0, tracker.IPv4, 1))
	sync(nil)
	want := r.chainOf(0)
	lost = true
	r.tracker.SetService(svc(0))
	r.tracker.SetSlice(epSlice(0, tracker.IPv4, 2, 3))
	sync(later)
	lost = false
	r.tracker.SetService(svc(0, backendtest.NodePort(30000)))
	r.tracker.SetSlice(epSlice(0, tracker.IPv4, 1))
	sync(nil)
	if got := r.chainOf(0); got != want || r.full != 1 {
		t.Errorf("%d full deltas, want 1; the Service has\n%s\nwant\n%s", r.full, got, want)
	}
}

// TestServicesGetAffinityWhenOthersGiveItUp has room for one Service with client affinity.
func TestServicesGetAffinityWhenOthersGiveItUp(t *testing.T) {
	t.Parallel()
	r := newMemoryRig(t)
	r.layout.Sticky = 1
	var log strings.Builder
	r.config.Log = slog.New(slog.NewTextHandler(&log, nil))
	r.start()
	for i := range 3 {
		r.tracker.SetService(svc(i, backendtest.Affinity(600), func(s *v1.Service) { s.CreationTimestamp = metav1.Unix(int64(100-i), 0) }))
		r.tracker.SetSlice(epSlice(i, tracker.IPv4, i+1))
	}
	r.sync()
	for _, want := range []int{2, 1, 0} { // the oldest first
		for i := range 3 {
			if has := strings.Contains(r.chainOf(i), "sticky"); has != (i == want) {
				t.Errorf("Service %d: chain %s", i, r.chainOf(i))
			}
		}
		r.tracker.DeleteService(backendtest.ServiceName(want))
		r.sync()
	}
	if n := strings.Count(log.String(), "without client affinity"); n != 1 {
		t.Errorf("%d reports of Services without affinity: %s", n, log.String())
	}
}

// TestClusterIPsComeLastInMemory looks at a cold start after each transaction. Packets to a cluster IP
// may be refused only once all of its ports are in the table.
func TestClusterIPsComeLastInMemory(t *testing.T) {
	t.Parallel()
	const services = 200
	r := newMemoryRig(t)
	r.memory.limit = 64 << 10
	for i := range services {
		r.tracker.SetService(svc(i))
		r.tracker.SetSlice(epSlice(i, tracker.IPv4, backendtest.UpTo(30)...))
	}
	halfway := 0
	r.memory.look = func() {
		t4 := r.memory.table(DefaultTable, tracker.IPv4)
		if n := len(elementsIn(t4, layout.ServiceIPs)); n != services {
			if n != 0 {
				halfway++
			}
			if refused := len(elementsIn(t4, layout.ClusterIPs)); refused != 0 {
				t.Errorf("with %d services, the table has %d addresses that refuse", n, refused)
			}
		}
	}
	r.sync()
	r.memory.look = nil
	if halfway == 0 {
		t.Error("the cold start took one transaction")
	}
	r.verify()
}

// TestMemoryFollowsInterfaces adds and removes interfaces of the fast path.
func TestMemoryFollowsInterfaces(t *testing.T) {
	t.Parallel()
	r := newMemoryRig(t)
	r.config.Offload = &Offload{Interfaces: []string{"veth*"}}
	r.memory.Kernel.Links = map[string]int{"lo": 1, "veth1": 2, "eth0": 3}
	r.start()
	r.tracker.SetService(svc(0))
	r.sync()
	check := func(want ...string) {
		t.Helper()
		for _, f := range []tracker.Family{tracker.IPv4, tracker.IPv6} {
			table := r.memory.inUse(f)
			if got := slices.Sorted(maps.Keys(table.Flowtables[layout.FastPath])); !slices.Equal(got, want) {
				t.Errorf("%v: flowtable has %v, want %v", f, got, want)
			}
			if n := len(elementsIn(table, layout.FastPathInterfaces)); n != len(want) {
				t.Errorf("%v: rules have %d interfaces, want %v", f, n, want)
			}
		}
		if err := r.backend.Check(t.Context()); err != nil {
			t.Errorf("Check returned %v", err)
		}
	}
	check("veth1")
	r.memory.Kernel.Links["veth2"] = 4
	must.Do(t, r.backend.refreshInterfaces(t.Context()))
	check("veth1", "veth2")
	delete(r.memory.Kernel.Links, "veth1")
	for _, f := range []tracker.Family{tracker.IPv4, tracker.IPv6} {
		r.memory.alter(f, func(t *memory.Table) { delete(t.Flowtables[layout.FastPath], "veth1") })
	}
	if err := r.backend.Check(t.Context()); err != nil {
		t.Errorf("Check returned %v after an interface was deleted", err)
	}
	r.cursor.Resync()
	r.sync()
	check("veth2")
	r.memory.alter(tracker.IPv4, func(t *memory.Table) { clear(t.Flowtables[layout.FastPath]) })
	if err := r.backend.Check(t.Context()); !errors.Is(err, ruleset.ErrNeedFull) {
		t.Errorf("Check returned %v after an interface was removed from the flowtable", err)
	}
}

// TestTablesNotYetWrittenAreNoDrift checks tables before the first full delta, and after a failure.
func TestTablesNotYetWrittenAreNoDrift(t *testing.T) {
	t.Parallel()
	r := newMemoryRig(t)
	r.tracker.SetService(svc(0))
	for range 2 { // with tables of an earlier process, too
		if err := r.backend.Check(t.Context()); err != nil {
			t.Errorf("before the first delta, Check returned %v", err)
		}
		r.sync()
		r.start()
	}
	r.sync()
	r.backend.discard(time.Now())
	var drift *dataplane.DriftError
	if err := r.backend.Check(t.Context()); errors.As(err, &drift) || !errors.Is(err, ruleset.ErrNeedFull) || !strings.Contains(err.Error(), "unknown") {
		t.Errorf("after a failure, Check returned %v", err)
	}
}
