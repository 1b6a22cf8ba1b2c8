package kubeapi

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	v1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/tools/cache"
)

func object(name, version string) *v1.Service {
	return &v1.Service{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: name, ResourceVersion: version}}
}

func TestStore(t *testing.T) {
	var got []string
	s := newStore(
		func(o *v1.Service) { got = append(got, "set "+o.Name+" "+o.ResourceVersion) },
		func(n types.NamespacedName) { got = append(got, "gone "+n.Name) },
		func() { got = append(got, "synced") })
	check := func(what string, err error, want ...string) {
		t.Helper()
		if err != nil {
			t.Errorf("%s: %v", what, err)
		}
		slices.Sort(got)
		slices.Sort(want)
		if !slices.Equal(got, want) {
			t.Errorf("%s: %q, want %q", what, got, want)
		}
		got = nil
	}
	check("nothing listed", s.Replace(nil, "1"), "synced")
	check("add", s.Add(object("a", "1")), "set a 1")
	check("update", s.Update(object("a", "2")), "set a 2")
	check("add", s.Add(object("b", "1")), "set b 1")
	check("delete", s.Delete(object("b", "2")), "gone b")
	check("tombstone", s.Delete(cache.DeletedFinalStateUnknown{Key: "ns/a"}), "gone a")
	check("list", s.Replace([]any{object("a", "1"), object("b", "1"), object("c", "1")}, "5"), "set a 1", "set b 1", "set c 1", "synced")
	// b was deleted, and d made, while nobody watched.
	check("list anew", s.Replace([]any{object("a", "2"), object("c", "1"), object("d", "1")}, "9"), "set a 2", "set c 1", "set d 1", "gone b", "synced")
	check("list of nothing", s.Replace(nil, "10"), "gone a", "gone c", "gone d", "synced")
	if err := s.Update(&v1.Pod{}); err == nil || !strings.Contains(fmt.Sprint(err), "unexpected *v1.Pod") {
		t.Errorf("another kind: %v", err)
	}
}
