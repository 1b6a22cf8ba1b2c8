package apiretry

import (
	"bytes"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"testing"

	v1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/tools/cache"
)

// recorded returns a store, and what it passed on since the last call of a function.
func recorded[T metav1.Object]() (s *store[T], passed func() []string) {
	var got []string
	s = &store[T]{names: map[cache.ObjectName]struct{}{}, Source: Source[T]{
		Set:    func(o T) { got = append(got, strings.TrimSpace("set "+o.GetName()+" "+o.GetResourceVersion())) },
		Gone:   func(n types.NamespacedName) { got = append(got, "gone "+n.String()) },
		Synced: func() { got = append(got, "synced") },
	}}
	return s, func() []string {
		out := got
		got = nil
		return out
	}
}

func object(name, version string) *v1.Service {
	return &v1.Service{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: name, ResourceVersion: version}}
}

func TestStorePassesOnChangesAndMissedDeletions(t *testing.T) {
	s, passed := recorded[*v1.Service]()
	check := func(what string, err error, want ...string) {
		t.Helper()
		if err != nil {
			t.Errorf("%s: %v", what, err)
		}
		got := passed()
		slices.Sort(got)
		slices.Sort(want)
		if !slices.Equal(got, want) {
			t.Errorf("%s: %q, want %q", what, got, want)
		}
	}
	check("empty list", s.Replace(nil, "1"), "synced")
	check("add", s.Add(object("a", "1")), "set a 1")
	check("update", s.Update(object("a", "2")), "set a 2")
	check("add", s.Add(object("b", "1")), "set b 1")
	check("delete", s.Delete(object("b", "2")), "gone ns/b")
	check("tombstone", s.Delete(cache.DeletedFinalStateUnknown{Key: "ns/a"}), "gone ns/a")
	check("list", s.Replace([]any{object("a", "1"), object("b", "1"), object("c", "1")}, "5"), "set a 1", "set b 1", "set c 1", "synced")
	// b was deleted and d created between two watches.
	check("second list", s.Replace([]any{object("a", "2"), object("c", "1"), object("d", "1")}, "9"), "set a 2", "set c 1", "set d 1", "gone ns/b", "synced")
	check("another empty list", s.Replace(nil, "10"), "gone ns/a", "gone ns/c", "gone ns/d", "synced")
	if err := s.Update(&v1.Pod{}); err == nil || !strings.Contains(fmt.Sprint(err), "unexpected *v1.Pod") {
		t.Errorf("an object of another kind: error %v, want unexpected *v1.Pod", err)
	}
}

// TestStreamedListIsPassedOnAtOnce collects a list as a reflector does that receives it as a
// stream. Each object must be passed on once, when it arrives, and only names may be kept.
func TestStreamedListIsPassedOnAtOnce(t *testing.T) {
	s, passed := recorded[*v1.Service]()
	check := func(what string, want ...string) {
		t.Helper()
		got := passed()
		if what != "while it is received" {
			slices.Sort(got)
		}
		if !slices.Equal(got, want) {
			t.Errorf("%s: %q, want %q", what, got, want)
		}
	}
	stream := func() cache.Store {
		return cache.NewStore(cache.DeletionHandlingMetaNamespaceKeyFunc, cache.WithTransformer(s.Transformer()))
	}
	replace := func(list cache.Store) {
		t.Helper()
		for _, o := range list.List() {
			if _, ok := o.(*v1.Service); ok {
				t.Error("an object was kept")
			}
		}
		if err := s.Replace(list.List(), "1"); err != nil {
			t.Error(err)
		}
	}
	first := stream()
	first.Add(object("a", "1"))
	first.Add(object("b", "1"))
	check("while it is received", "set a 1", "set b 1")
	replace(first)
	check("first list", "synced")

	// a was deleted before the watch began. c is created and deleted while the list is
	// received.
	second := stream()
	second.Add(object("b", "2"))
	second.Add(object("c", "3"))
	second.Delete(object("c", "4"))
	check("while it is received", "set b 2", "set c 3")
	replace(second)
	check("second list", "gone ns/a", "gone ns/c", "synced")

	// The next list removes objects that only an interrupted stream held.
	stream().Add(object("d", "5"))
	third := stream()
	third.Add(object("b", "2"))
	replace(third)
	check("third list", "gone ns/d", "set b 2", "set d 5", "synced")

	node, passed := recorded[*v1.Node]()
	list := cache.NewStore(cache.DeletionHandlingMetaNamespaceKeyFunc, cache.WithTransformer(node.Transformer()))
	list.Add(&v1.Node{ObjectMeta: metav1.ObjectMeta{Name: "n1"}})
	node.Replace(list.List(), "1")
	if got := passed(); !slices.Equal(got, []string{"set n1", "synced"}) {
		t.Errorf("without a namespace: %q", got)
	}
}

// TestObjectsOfAnotherTypeAreIgnored hands in what an informer of another resource has.
func TestObjectsOfAnotherTypeAreIgnored(t *testing.T) {
	var log bytes.Buffer
	s, passed := recorded[*v1.Service]()
	s.log = slog.New(slog.NewTextHandler(&log, nil))
	for range 3 {
		s.pass(&v1.Pod{})
	}
	s.pass(&v1.Service{})
	if got := passed(); len(got) != 1 || strings.Count(log.String(), "another type") != 1 {
		t.Errorf("%q, log: %s", got, &log)
	}
}
