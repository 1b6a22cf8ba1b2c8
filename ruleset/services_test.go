package ruleset

import (
	"fmt"
	"maps"
	"slices"
	"testing"

	"k8s.io/apimachinery/pkg/types"

	"github.com/go-proxier/proxier/tracker"
)

// TestEndedNotifyIsNotCalled ends a registration while another stays.
func TestEndedNotifyIsNotCalled(t *testing.T) {
	tr, e := world(t, Config{}, tracker.NodeInfo{Name: "n1"})
	var ended, stays int
	end := e.Notify(func() { ended++ })
	e.Notify(func() { stays++ })
	end()
	end()
	tr.SetService(service("a", "172.30.0.1"))
	e.SetServiceCIDRs(prefixes("172.30.0.0/16"), nil)
	if ended != 0 || stays != 2 || len(e.notify) != 1 {
		t.Errorf("%d calls after the end, %d of the other, %d registered", ended, stays, len(e.notify))
	}
}

// TestDeltaFromLeadsToTheSnapshot has two engines whose Services came in different orders, so that their IDs
// belong to different Services.
func TestDeltaFromLeadsToTheSnapshot(t *testing.T) {
	ta, a := world(t, Config{}, tracker.NodeInfo{Name: "n1"})
	tb, b := world(t, Config{}, tracker.NodeInfo{Name: "n1"})
	for i, name := range []string{"same", "gone", "moved", "grown"} {
		ta.SetService(service(name, fmt.Sprint("172.30.0.", i+1)))
		ta.SetSlice(slice(name, "10.0.0.1"))
		a.Snapshot() // each gets the next ID
	}
	for _, s := range []struct {
		name, ip  string
		endpoints []string
	}{
		{"new", "172.30.0.8", []string{"10.0.0.1"}}, {"grown", "172.30.0.4", []string{"10.0.0.1", "10.0.0.2"}},
		{"other", "172.30.0.9", []string{"10.0.0.1"}}, {"same", "172.30.0.1", []string{"10.0.0.1"}}, {"moved", "172.30.0.33", []string{"10.0.0.1"}},
	} {
		tb.SetService(service(s.name, s.ip))
		tb.SetSlice(slice(s.name, s.endpoints...))
		b.Snapshot() // each gets the next ID
	}

	from, to := a.Snapshot(), b.Snapshot()
	d := to.DeltaFrom(from)
	signs := map[string]string{}
	ids, now := map[uint32]string{}, map[tracker.Key]*Port{}
	for _, p := range from.Ports {
		now[p.Key] = p
	}
	for _, c := range d.Changes {
		switch {
		case c.Old == nil:
			signs[c.Key.Name] = "+"
		case c.New == nil:
			signs[c.Key.Name] = "-"
		default:
			signs[c.Key.Name] = "~ " + c.Fields.String()
		}
		if c.Old != now[c.Key] || c.Old != nil && c.New != nil && c.Old.ID != c.New.ID {
			t.Errorf("%v: Old is not that of the first snapshot, or the ID differs", c.Key)
		}
		if now[c.Key] = c.New; c.New == nil {
			delete(now, c.Key)
		}
	}
	want := map[string]string{"gone": "-", "grown": "~ " + (FieldCluster | FieldEndpoints).String(), "moved": "~ " + FieldFrontends.String(), "new": "+", "other": "+"}
	if !maps.Equal(signs, want) {
		t.Errorf("changes %v, want %v", signs, want)
	}
	for key, p := range now {
		if ids[p.ID] != "" {
			t.Errorf("%s and %v have the ID %d", ids[p.ID], key, p.ID)
		}
		ids[p.ID] = key.String()
	}
	var names []string
	for _, p := range to.Ports {
		names = append(names, p.Key.String())
	}
	slices.Sort(names)
	if got := slices.Sorted(maps.Values(ids)); !slices.Equal(got, names) {
		t.Errorf("after the changes: %v, want %v", got, names)
	}
	// Within one engine, IDs are those of the engine.
	ta.DeleteService(types.NamespacedName{Namespace: "default", Name: "gone"})
	after := a.Snapshot()
	if d := after.DeltaFrom(from); len(d.Changes) != 1 || d.Changes[0].Key.Name != "gone" {
		t.Errorf("one deleted Service makes %v", d.Changes)
	}
}
