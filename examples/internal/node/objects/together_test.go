package objects

import (
	"context"
	"fmt"
	"log/slog"
	"testing"

	v1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/go-proxier/proxier/examples/internal/node/configtest"
	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/tracker"
)

// TestObjectsHandedInTogetherAreSyncedTogether syncs while objects are handed in, and hands objects in
// while a delta is applied. Neither waits for the other.
func TestObjectsHandedInTogetherAreSyncedTogether(t *testing.T) {
	w, err := New(configtest.Parsed(t, []string{"run", "--cluster-cidr=10.0.0.0/8"}), []tracker.Family{tracker.IPv4}, nil, WorldHooks{}, slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
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
		if err := cursor.Sync(t.Context()); err != nil {
			t.Fatal(err)
		}
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
