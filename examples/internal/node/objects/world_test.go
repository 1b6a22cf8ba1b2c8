package objects

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"testing"

	v1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/go-proxier/proxier/examples/internal/node/configtest"
	"github.com/go-proxier/proxier/internal/testing/must"
	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/tracker"
)

// TestAddressesThatCannotBeReadStay makes a reading of the node's addresses fail, at the start and
// later.
func TestAddressesThatCannotBeReadStay(t *testing.T) {
	var own []netip.Addr
	var failed error
	calls := ""
	hooks := WorldHooks{
		Own:      func() ([]netip.Addr, error) { return own, failed },
		OwnInUse: func(err error) { calls += fmt.Sprint(err == nil, " ") },
	}
	open := func() (*World, error) {
		return New(configtest.Parsed(t, []string{"run", "--cluster-cidr=10.0.0.0/8"}), []tracker.Family{tracker.IPv4}, nil, hooks, slog.New(slog.DiscardHandler))
	}
	broken := errors.New("no memory")
	failed = broken
	if _, err := open(); !errors.Is(err, broken) {
		t.Errorf("at the start: error %v", err)
	}
	own, failed = []netip.Addr{netip.MustParseAddr("192.0.2.1")}, nil
	w := must.Get(open())(t)
	own, failed = nil, broken
	w.RefreshNode()
	if got := fmt.Sprint(w.Tracker.Node().Addresses); got != "[192.0.2.1]" {
		t.Errorf("addresses %s after a reading that failed", got)
	}
	failed = nil
	w.RefreshNode()
	if got := w.Tracker.Node().Addresses; len(got) != 0 {
		t.Errorf("addresses %v of a node that has none", got)
	}
	if want := "false true false true "; calls != want {
		t.Errorf("OwnInUse: %s, want %s", calls, want)
	}
}

// TestObjectsHandedInTogetherAreSyncedTogether syncs while objects are handed in, and hands objects in
// while a delta is applied. Neither waits for the other.
func TestObjectsHandedInTogetherAreSyncedTogether(t *testing.T) {
	w := must.Get(New(configtest.Parsed(t, []string{"run", "--cluster-cidr=10.0.0.0/8"}), []tracker.Family{tracker.IPv4}, nil, WorldHooks{}, slog.New(slog.DiscardHandler)))(t)
	w.Tracker.MarkSynced(tracker.KindServices, tracker.KindSlices, tracker.KindNodes)
	service := func(n int) {
		w.SetService(&v1.Service{
			ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: fmt.Sprint("s", n)},
			Spec:       v1.ServiceSpec{ClusterIP: fmt.Sprintf("10.96.0.%d", n), Ports: []v1.ServicePort{{Port: 80}}},
		})
	}
	var changes []int
	var applying func()
	cursor := w.Engine.Attach("rules", ruleset.BackendFunc(func(_ context.Context, d *ruleset.Delta) error {
		changes = append(changes, len(d.Changes))
		if applying != nil {
			applying()
			applying = nil
		}
		return nil
	}))
	sync := func() {
		t.Helper()
		must.Do(t, cursor.Sync(t.Context()))
	}
	sync()
	w.Together(func() {
		service(1)
		sync()
		service(2)
	})
	applying = func() { w.Together(func() { service(3); service(4) }) }
	sync()
	sync()
	if got, want := fmt.Sprint(changes), "[0 2 2]"; got != want {
		t.Errorf("changes of each delta: %s, want %s", got, want)
	}
}
