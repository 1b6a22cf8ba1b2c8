package model

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"strings"
	"testing"
	"time"

	v1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/go-proxier/proxier/internal/testing/backendtest"
	"github.com/go-proxier/proxier/nftables/internal/layout"
	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/tracker"
)

// chainOf returns the handling of a Service's cluster IP, without numbers.
func (r *rig) chainOf(i int) string {
	t := r.backend.kernel.tables[tracker.IPv4]
	_, _, key := layout.FrontendKey(false, netip.MustParseAddr(fmt.Sprintf("10.96.0.%d", i+1)), "TCP", 80)
	e, ok := t.found(layout.ServiceIPs, key)
	if !ok {
		return ""
	}
	return t.resolve(layout.Handlers, number(e.data))
}

// TestLostAcknowledgmentNeedsAFullDelta hides from the cursor that a change is in effect, and then
// changes the Service again.
func TestLostAcknowledgmentNeedsAFullDelta(t *testing.T) {
	r := newRig(t)
	lost := false
	later := errors.New("a later step failed")
	cursor := r.engine.Attach("wrapper", ruleset.BackendFunc(func(ctx context.Context, d *ruleset.Delta) error {
		err := r.backend.Apply(ctx, d)
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
	if got := r.chainOf(0); got != want || r.backend.full != 2 {
		t.Errorf("%d full deltas, want 2; the Service has\n%s\nwant\n%s", r.backend.full, got, want)
	}
}

// TestServicesGetAffinityWhenOthersGiveItUp has room for one Service with client affinity.
func TestServicesGetAffinityWhenOthersGiveItUp(t *testing.T) {
	r := newRig(t)
	r.backend.config.Sticky = 1
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
	lacking := 0
	r.backend.tables.Lacking(func(_ tracker.Key, err error) {
		if !errors.Is(err, errTooManySticky) {
			t.Error(err)
		}
		lacking++
	})
	if lacking != 1 {
		t.Errorf("%d reports of Services without affinity", lacking)
	}
}

// TestServiceTooLargeFailsAlone changes a Service in a way that has no room in a transaction.
func TestServiceTooLargeFailsAlone(t *testing.T) {
	r := newRig(t)
	r.backend.sink.limit = 16 << 10
	for i := range 2 {
		r.tracker.SetService(svc(i))
		r.tracker.SetSlice(epSlice(i, tracker.IPv4, 1, 2))
	}
	r.sync()
	r.tracker.SetSlice(epSlice(0, tracker.IPv4, append(backendtest.UpTo(900)[1:], 1)...))
	r.tracker.SetSlice(epSlice(1, tracker.IPv4, 3))
	var partial *ruleset.PartialError
	if err := r.cursor.Sync(t.Context()); !errors.As(err, &partial) || len(partial.Failed) != 1 || !errors.Is(err, ErrTooLarge) {
		t.Fatalf("Sync returned %v", err)
	}
	if a, b := r.chainOf(0), r.chainOf(1); a != "cluster-ip-2 [10.244.0.1:8080 10.244.0.2:8080]" || b != "cluster-ip-1 [10.244.0.3:8080]" || r.backend.full != 1 {
		t.Errorf("chains %s and %s after %d full deltas", a, b, r.backend.full)
	}
	r.tracker.SetSlice(epSlice(0, tracker.IPv4, 2, 5))
	r.sync()
	r.verify()
}

// TestClusterIPsComeLast looks at a cold start after each transaction. Packets to a cluster IP may be
// refused only once all of its ports are in the table.
func TestClusterIPsComeLast(t *testing.T) {
	const services = 200
	r := newRig(t)
	r.backend.sink.limit = 64 << 10
	for i := range services {
		r.tracker.SetService(svc(i))
		r.tracker.SetSlice(epSlice(i, tracker.IPv4, backendtest.UpTo(30)...))
	}
	halfway := 0
	r.backend.sink.after = func() error {
		t4 := r.backend.kernel.tables[tracker.IPv4]
		if n := len(t4.elements(layout.ServiceIPs)); n != services {
			if n != 0 {
				halfway++
			}
			if refused := len(t4.elements(layout.ClusterIPs)); refused != 0 {
				t.Errorf("with %d services, the table has %d addresses that refuse", n, refused)
			}
		}
		return nil
	}
	r.sync()
	if halfway == 0 {
		t.Error("the cold start took one transaction")
	}
	r.verify()
}

// TestSmallPoolsNeedNoNewChain gives a Service each number of endpoints up to ExactBuckets.
func TestSmallPoolsNeedNoNewChain(t *testing.T) {
	r := newRig(t)
	r.tracker.SetService(svc(1))
	r.tracker.SetSlice(epSlice(1, tracker.IPv4, 1, 2))
	r.sync()
	for n := 1; n <= layout.ExactBuckets; n++ {
		if _, ok := r.backend.tables.Table(tracker.IPv4).Chains()[layout.Handler{Buckets: n}.Chain()]; !ok {
			t.Errorf("there is no chain for %d buckets", n)
		}
	}
}

// TestUnusedStickyHandlersAreCollected changes the timeouts of a few Services again and again.
func TestUnusedStickyHandlersAreCollected(t *testing.T) {
	r := newRig(t)
	for i := range 5 * KeepUnused {
		for s := range 3 {
			r.tracker.SetService(svc(s, backendtest.Affinity(int32(100+i*(s+1)))))
			r.tracker.SetSlice(epSlice(s, tracker.IPv4, backendtest.UpTo(1+i%3)...))
		}
		r.sync()
		if n := len(r.backend.tables.Table(tracker.IPv4).Verdicts()[layout.StickyHandlers]); n > KeepUnused+6 {
			t.Fatalf("round %d: %d sticky handlers", i, n)
		}
	}
	if r.backend.full != 1 {
		t.Errorf("%d full deltas", r.backend.full)
	}
	r.verify()
}

// TestInterfacesAreAddedAndRemoved follows the interfaces of the fast path.
func TestInterfacesAreAddedAndRemoved(t *testing.T) {
	c := DefaultConfig
	c.FastPath = true
	tab := NewTable(tracker.IPv4, &ruleset.Node{}, c, nil, 0)
	for _, step := range []struct {
		links        map[string]int
		add, removed int
	}{
		{map[string]int{"a": 1, "b": 2}, 2, 0}, {map[string]int{"b": 2, "c": 3}, 1, 1}, {map[string]int{"b": 2, "c": 3}, 0, 0},
	} {
		tx := &Tx{}
		tab.SetInterfaces(step.links, tx)
		add, removed := 0, 0
		for _, e := range tx.Edits {
			if e.Deletion {
				removed++
			} else {
				add++
			}
		}
		if add != step.add || removed != step.removed {
			t.Errorf("%v: %d added, %d removed", step.links, add, removed)
		}
		tab.KeepInterfaces(step.links)
		if n := tab.Count(layout.FastPathInterfaces); n != len(step.links) {
			t.Errorf("%d interfaces", n)
		}
	}
}

// TestClientsOfAnotherDataPlaneAreRecalled gives a new Service the clients that another data plane
// remembers. Those of another family, and those whose time is up, are left out.
func TestClientsOfAnotherDataPlaneAreRecalled(t *testing.T) {
	r := newRig(t)
	r.tracker.SetService(svc(0, backendtest.Affinity(600)))
	r.tracker.SetSlice(epSlice(0, tracker.IPv4, 1, 2))
	var change ruleset.Change
	c := r.engine.Attach("capture", ruleset.BackendFunc(func(_ context.Context, d *ruleset.Delta) error {
		for _, ch := range d.Changes {
			if ch.Key.Family == tracker.IPv4 {
				change = ch
			}
		}
		return nil
	}))
	if err := c.Sync(t.Context()); err != nil {
		t.Fatal(err)
	}
	tab := NewTable(tracker.IPv4, r.engine.Snapshot().Node, DefaultConfig, nil, 0)
	calls := map[netip.AddrPort]int{}
	tab.Recall(func(_ tracker.Key, ep netip.AddrPort) map[netip.Addr]time.Duration {
		calls[ep]++
		return map[netip.Addr]time.Duration{
			netip.MustParseAddr("192.0.2.1"): 100 * time.Second, netip.MustParseAddr("192.0.2.2"): time.Hour, netip.MustParseAddr("fd00::1"): 0,
		}
	})
	tx := &Tx{}
	if err := tab.Change(&change, tx); err != nil {
		t.Fatal(err)
	}
	clients := 0
	for _, e := range tx.Edits {
		if e.Set == layout.StickyClients {
			clients++
			if e.Timeout != 600*time.Second || e.Left != 500*time.Second {
				t.Errorf("timeout %v, %v left", e.Timeout, e.Left)
			}
		}
	}
	if clients != 2 || len(calls) != 2 || calls[netip.MustParseAddrPort("10.244.0.1:8080")] != 1 {
		t.Errorf("%d clients, calls %v", clients, calls)
	}
}
