package grouptable

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"testing"

	v1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/go-proxier/proxier/internal/testing/must"
	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/ruleset/driver"
	"github.com/go-proxier/proxier/tracker"
)

// fakeSwitch is a switch in memory whose writes may fail. It reports a group with a missing
// endpoint as an error of the test.
type fakeSwitch struct {
	t         *testing.T
	fails     func() bool
	endpoints map[driver.Endpoint]bool
	groups    map[uint32]group
	installs  int
}

// group is an entry of a fakeSwitch's group table.
type group struct {
	name    driver.Pool
	buckets []driver.Endpoint
}

var errFake = errors.New("the switch is busy")

func (s *fakeSwitch) do(f func()) error {
	if s.fails() {
		return errFake
	}
	f()
	for _, g := range s.groups {
		for _, e := range g.buckets {
			if !s.endpoints[e] {
				s.t.Errorf("group %v sends to %v, which is not installed", g.name, e)
			}
		}
	}
	return nil
}

func (s *fakeSwitch) InstallEndpoint(e driver.Endpoint) error {
	return s.do(func() { s.endpoints[e] = true; s.installs++ })
}

func (s *fakeSwitch) RemoveEndpoint(e driver.Endpoint) error {
	return s.do(func() { delete(s.endpoints, e) })
}

func (s *fakeSwitch) InstallGroup(id uint32, g driver.Pool, b []driver.Endpoint) error {
	return s.do(func() { s.groups[id] = group{g, b} })
}
func (s *fakeSwitch) RemoveGroup(id uint32) error { return s.do(func() { delete(s.groups, id) }) }

func (s *fakeSwitch) Endpoints() ([]driver.Endpoint, error) {
	return slices.Collect(maps.Keys(s.endpoints)), nil
}

func (s *fakeSwitch) Groups() (map[uint32]driver.Pool, error) {
	names := map[uint32]driver.Pool{}
	for id, g := range s.groups {
		names[id] = g.name
	}
	return names, nil
}

type world struct {
	t       *testing.T
	empty   bool // as of New
	sw      *fakeSwitch
	tracker *tracker.Tracker
	engine  *ruleset.Engine
	cursor  *ruleset.Cursor
}

func newWorld(t *testing.T, empty bool, fails func() bool) *world {
	w := &world{t: t, empty: empty, sw: &fakeSwitch{t, fails, map[driver.Endpoint]bool{}, map[uint32]group{}, 0}}
	w.restart()
	return w
}

// restart starts a new backend with the same switch.
func (w *world) restart() {
	w.t.Helper()
	var err error
	if w.tracker, err = tracker.New(tracker.Config{Node: tracker.NodeInfo{Name: "here"}}); err != nil {
		w.t.Fatal(err)
	}
	if w.engine, err = ruleset.NewEngine(ruleset.Config{Source: w.tracker}); err != nil {
		w.t.Fatal(err)
	}
	table, err := New(w.sw, w.empty)
	if err != nil {
		w.t.Fatal(err)
	}
	w.cursor = w.engine.Attach("switch", table)
	w.tracker.MarkSynced(tracker.KindServices, tracker.KindSlices, tracker.KindNodes)
}

// set sets a Service with endpoints on this node (odd ones) and on others.
func (w *world) set(name, ip string, local bool, endpoints ...int) {
	s := &v1.Service{
		ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: name},
		Spec:       v1.ServiceSpec{Type: v1.ServiceTypeNodePort, ClusterIP: ip, Ports: []v1.ServicePort{{Port: 80, NodePort: 30080}}},
	}
	if local {
		s.Spec.ExternalTrafficPolicy = v1.ServiceExternalTrafficPolicyLocal
	}
	w.tracker.SetService(s)
	slice := &discovery.EndpointSlice{
		ObjectMeta:  metav1.ObjectMeta{Namespace: "ns", Name: name, Labels: map[string]string{discovery.LabelServiceName: name}},
		AddressType: discovery.AddressTypeIPv4,
		Ports:       []discovery.EndpointPort{{Name: new(""), Port: new(int32(8080))}},
	}
	for _, i := range endpoints {
		slice.Endpoints = append(slice.Endpoints, discovery.Endpoint{
			Addresses: []string{fmt.Sprint("10.0.0.", i)}, NodeName: &[]string{"there", "here"}[i%2],
		})
	}
	w.tracker.SetSlice(slice)
}

func (w *world) agree() {
	w.t.Helper()
	endpoints, groups := map[driver.Endpoint]bool{}, map[driver.Pool][]driver.Endpoint{}
	for _, s := range w.engine.Snapshot().Ports {
		for _, p := range []ruleset.Target{ruleset.TargetCluster, ruleset.TargetLocal} {
			if w.empty && s.HasPool(p) {
				groups[driver.Pool{Service: s.Key, Target: p}] = nil
			}
			for _, ep := range s.Pool(p) {
				e := driver.EndpointOf(s, ep)
				endpoints[e] = true
				groups[driver.Pool{Service: s.Key, Target: p}] = append(groups[driver.Pool{Service: s.Key, Target: p}], e)
			}
		}
	}
	if !maps.Equal(endpoints, w.sw.endpoints) {
		w.t.Errorf("endpoints %v, want %v", w.sw.endpoints, endpoints)
	}
	got := map[driver.Pool][]driver.Endpoint{}
	for _, g := range w.sw.groups {
		got[g.name] = g.buckets
	}
	if len(got) != len(w.sw.groups) || !maps.EqualFunc(groups, got, slices.Equal[[]driver.Endpoint]) {
		w.t.Errorf("groups %v, want %v", w.sw.groups, groups)
	}
}

func TestSharedEndpointIsInstalledOnce(t *testing.T) {
	w := newWorld(t, false, func() bool { return false })
	sync := func() {
		t.Helper()
		must.Do(t, w.cursor.Sync(t.Context()))
		w.agree()
	}
	sync()
	w.set("a", "10.96.0.1", false, 1, 2)
	w.set("b", "10.96.0.2", true, 2, 3)
	sync()
	if w.sw.installs != 3 {
		t.Errorf("%d installs for 3 endpoints", w.sw.installs)
	}
	w.tracker.DeleteService(types.NamespacedName{Namespace: "ns", Name: "a"})
	sync()
	w.set("c", "10.96.0.3", false, 2, 3)
	sync()
	if w.sw.installs != 3 {
		t.Errorf("%d installs, though nothing new was needed", w.sw.installs)
	}
}

func TestFailedEndpointIsTriedForTheNextService(t *testing.T) {
	fail := false
	w := newWorld(t, false, func() bool {
		was := fail
		fail = false
		return was
	})
	must.Do(t, w.cursor.Sync(t.Context()))
	w.set("a", "10.96.0.1", false, 1)
	w.set("b", "10.96.0.2", false, 1)
	fail = true // the first write fails
	var partial *ruleset.PartialError
	if err := w.cursor.Sync(t.Context()); !errors.As(err, &partial) || len(partial.Failed) != 1 {
		t.Fatalf("error %v", err)
	}
	if len(w.sw.endpoints) != 1 || len(w.sw.groups) != 1 {
		t.Errorf("the other has endpoints %v, groups %v", w.sw.endpoints, w.sw.groups)
	}
	must.Do(t, w.cursor.Sync(t.Context()))
	w.agree()
}

// TestRestartKeepsIDs also checks that endpoints are not installed again, and that groups
// and endpoints that are no longer needed are removed.
func TestRestartKeepsIDs(t *testing.T) {
	w := newWorld(t, false, func() bool { return false })
	sync := func() map[uint32]driver.Pool {
		t.Helper()
		must.Do(t, w.cursor.Sync(t.Context()))
		w.agree()
		names, _ := w.sw.Groups()
		return names
	}
	w.set("a", "10.96.0.1", false, 2)
	sync()
	w.set("b", "10.96.0.2", false, 2, 3)
	w.tracker.DeleteService(types.NamespacedName{Namespace: "ns", Name: "a"})
	before := sync()
	// A second group of the same name, which no process should leave.
	for id, g := range maps.Clone(w.sw.groups) {
		w.sw.groups[id+10] = g
	}
	installs := w.sw.installs
	w.restart()
	w.set("a", "10.96.0.1", false, 3)
	w.set("b", "10.96.0.2", false, 2, 3)
	after := sync()
	if w.sw.installs != installs {
		t.Errorf("%d endpoints installed again", w.sw.installs-installs)
	}
	kept := 0
	for id, g := range after {
		for was, h := range before {
			if g == h && (id == was || id == was+10) {
				kept++
			}
		}
	}
	if kept != len(before) || len(after) != 2*len(before) {
		t.Errorf("groups %v after a restart, %v before", after, before)
	}
}
