package mapplane

import (
	"errors"
	"fmt"
	"iter"
	"maps"
	"math/rand/v2"
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

// fake is a map whose writes may fail. It calls a check after each write.
type fake[K comparable, V any] struct {
	m     map[K]V
	fails func() bool
	look  func()
	// calls counts the calls, and writes their entries.
	calls, writes int
}

var errFake = errors.New("map is full")

func (f *fake[K, V]) Put(keys []K, values []V) error {
	f.calls++
	for i, k := range keys {
		f.writes++
		if f.fails() {
			return errFake
		}
		f.m[k] = values[i]
		f.look()
	}
	return nil
}

func (f *fake[K, V]) Delete(keys []K) error {
	f.calls++
	for _, k := range keys {
		f.writes++
		if f.fails() {
			return errFake
		}
		delete(f.m, k)
		f.look()
	}
	return nil
}

func (f *fake[K, V]) All() iter.Seq2[K, V] { return maps.All(maps.Clone(f.m)) }

// world is a Plane with random changes.
type world struct {
	tracker   *tracker.Tracker
	engine    *ruleset.Engine
	cursor    *ruleset.Cursor
	frontends *fake[driver.Frontend, Action]
	members   *fake[driver.Slot[driver.Pool], Endpoint]
}

func newWorld(t testing.TB, fails func() bool) *world {
	t.Helper()
	w := &world{}
	// At any moment a frontend that forwards must lead to a pool without gaps that has at
	// least the size in the frontend's entry.
	look := func() {
		for f, a := range w.frontends.m {
			for target, size := range map[ruleset.Target]int{a.Target: a.Size, a.Internal: a.InternalSize} {
				if target != ruleset.TargetCluster && target != ruleset.TargetLocal {
					continue
				}
				if size == 0 {
					t.Errorf("frontend %v leads to the %s of %s, of which there are none", f, target, a.Service)
				}
				for i := range size {
					if _, ok := w.members.m[driver.Slot[driver.Pool]{Pool: driver.Pool{Service: a.Service, Target: target}, N: i}]; !ok {
						t.Errorf("frontend %v leads to %d %s of %s, of which slot %d is empty", f, size, target, a.Service, i)
					}
				}
			}
		}
	}
	w.frontends = &fake[driver.Frontend, Action]{map[driver.Frontend]Action{}, fails, look, 0, 0}
	w.members = &fake[driver.Slot[driver.Pool], Endpoint]{map[driver.Slot[driver.Pool]]Endpoint{}, fails, look, 0, 0}
	w.restart(t)
	return w
}

// restart starts a new Plane with the same maps.
func (w *world) restart(t testing.TB) {
	t.Helper()
	var err error
	if w.tracker, err = tracker.New(tracker.Config{Node: tracker.NodeInfo{Name: "here"}}); err != nil {
		t.Fatal(err)
	}
	if w.engine, err = ruleset.NewEngine(ruleset.Config{Source: w.tracker}); err != nil {
		t.Fatal(err)
	}
	plane := must.Get(New(w.frontends, w.members))(t)
	w.cursor = w.engine.Attach("maps", plane)
	w.tracker.MarkSynced(tracker.KindServices, tracker.KindSlices, tracker.KindNodes)
}

// change makes a random change to one of a few Services, which share external addresses.
func (w *world) change(r *rand.Rand) {
	i := r.IntN(4)
	name := types.NamespacedName{Namespace: "ns", Name: fmt.Sprint("s", i)}
	switch r.IntN(5) {
	case 0:
		w.tracker.DeleteService(name)
	case 1, 2:
		s := &v1.Service{
			ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: name.Name},
			Spec: v1.ServiceSpec{
				Type: v1.ServiceTypeNodePort, ClusterIP: fmt.Sprint("10.96.0.", i+1),
				ExternalIPs:           []string{fmt.Sprint("203.0.113.", r.IntN(2))},
				ExternalTrafficPolicy: []v1.ServiceExternalTrafficPolicy{"Local", "Cluster"}[r.IntN(2)],
				Ports:                 []v1.ServicePort{{Port: int32(80 + r.IntN(2)), NodePort: int32(30080 + r.IntN(3))}},
			},
		}
		w.tracker.SetService(s)
	default:
		slice := &discovery.EndpointSlice{
			ObjectMeta:  metav1.ObjectMeta{Namespace: "ns", Name: name.Name, Labels: map[string]string{discovery.LabelServiceName: name.Name}},
			AddressType: discovery.AddressTypeIPv4,
			Ports:       []discovery.EndpointPort{{Name: new(""), Port: new(int32(8080))}},
		}
		for e := range 4 {
			if r.IntN(2) == 0 {
				node := []string{"here", "there"}[e%2]
				slice.Endpoints = append(slice.Endpoints, discovery.Endpoint{Addresses: []string{fmt.Sprint("10.0.0.", e+1)}, NodeName: &node})
			}
		}
		w.tracker.SetSlice(slice)
	}
}

// agree compares the maps with the ruleset.
func (w *world) agree(t *testing.T) {
	t.Helper()
	frontends, pools, entries := map[driver.Frontend]Action{}, map[driver.Pool]map[Endpoint]bool{}, 0
	for _, s := range w.engine.Snapshot().Ports {
		for i := range s.Frontends {
			f := &s.Frontends[i]
			frontends[driver.Frontend{Addr: f.Addr, Port: f.Port, Protocol: s.Key.Protocol, Family: s.Key.Family}] = actionOf(s, f)
		}
		for _, target := range []ruleset.Target{ruleset.TargetCluster, ruleset.TargetLocal} {
			pool := map[Endpoint]bool{}
			for _, ep := range s.Pool(target) {
				pool[Endpoint{ep.Addr, ep.Weight}] = true
				entries++
			}
			pools[driver.Pool{Service: s.Key, Target: target}] = pool
		}
	}
	if !maps.Equal(frontends, w.frontends.m) {
		t.Errorf("frontends %v, want %v", w.frontends.m, frontends)
	}
	for m, ep := range w.members.m {
		if pool := pools[m.Pool]; m.N >= len(pool) || !pool[ep] {
			t.Errorf("member %v is %v, want one of %v", m, ep, pool)
		}
	}
	if len(w.members.m) != entries {
		t.Errorf("%d members, want %d", len(w.members.m), entries)
	}
}

// TestRestartWritesNothing also checks that a changed endpoint costs one write.
func TestRestartWritesNothing(t *testing.T) {
	w := newWorld(t, func() bool { return false })
	feed := func(last int) {
		w.tracker.SetService(&v1.Service{
			ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: "web"},
			Spec:       v1.ServiceSpec{ClusterIP: "10.96.0.1", Ports: []v1.ServicePort{{Port: 80}}},
		})
		slice := &discovery.EndpointSlice{
			ObjectMeta:  metav1.ObjectMeta{Namespace: "ns", Name: "web", Labels: map[string]string{discovery.LabelServiceName: "web"}},
			AddressType: discovery.AddressTypeIPv4,
			Ports:       []discovery.EndpointPort{{Name: new(""), Port: new(int32(8080))}},
		}
		for _, i := range []int{1, 2, 3, last} {
			slice.Endpoints = append(slice.Endpoints, discovery.Endpoint{Addresses: []string{fmt.Sprint("10.0.0.", i)}})
		}
		w.tracker.SetSlice(slice)
	}
	writes := func() int {
		t.Helper()
		w.frontends.writes, w.members.writes = 0, 0
		must.Do(t, w.cursor.Sync(t.Context()))
		w.agree(t)
		return w.frontends.writes + w.members.writes
	}
	feed(4)
	if n := writes(); n != 5 {
		t.Errorf("%d writes for a frontend and four endpoints", n)
	}
	w.restart(t)
	feed(4)
	if n := writes(); n != 0 {
		t.Errorf("%d writes after a restart", n)
	}
	feed(5)
	if n := writes(); n != 1 {
		t.Errorf("%d writes for an endpoint in place of another", n)
	}
}

func TestFullDeltaRepairsForeignChanges(t *testing.T) {
	r := rand.New(rand.NewPCG(9, 9))
	w := newWorld(t, func() bool { return false })
	for range 100 {
		w.change(r)
	}
	must.Do(t, w.cursor.Sync(t.Context()))
	for m := range w.members.All() {
		if r.IntN(2) == 0 {
			delete(w.members.m, m)
		}
	}
	for f := range w.frontends.All() {
		delete(w.frontends.m, f)
		break
	}
	stray := w.engine.Snapshot().Ports[0].Endpoints[0]
	w.members.m[driver.Slot[driver.Pool]{N: 3}] = Endpoint{stray.Addr, 1}
	w.members.look = func() {}
	w.cursor.Resync()
	must.Do(t, w.cursor.Sync(t.Context()))
	w.agree(t)
}
