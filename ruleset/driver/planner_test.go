package driver_test

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"strings"
	"testing"

	v1 "k8s.io/api/core/v1"

	"github.com/go-proxier/proxier/internal/testing/must"
	"github.com/go-proxier/proxier/internal/testing/testtime"
	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/ruleset/conformance"
	"github.com/go-proxier/proxier/ruleset/driver"
	"github.com/go-proxier/proxier/tracker"
)

var errRefused = errors.New("refused")

// TestDriverPassesConformance runs the suite's worlds. After each write, nothing may refer to a
// missing entry, and no entry is written that is there.
func TestDriverPassesConformance(t *testing.T) {
	variants := []variant{
		{replace: true}, {slots: true, byService: true, batches: true},
		{byService: true, batches: true, replace: true}, {slots: true, unreadable: true},
	}
	if !testtime.Thorough() {
		variants = variants[:2]
	}
	for _, v := range variants {
		t.Run(fmt.Sprintf("%+v", v), func(t *testing.T) {
			skip := map[conformance.Feature]string{
				conformance.LoopbackNodePorts: "no packet from a loopback address leaves the node",
				conformance.ClosedPorts:       "frontends are all there is",
				conformance.ServiceCIDRs:      "as closed ports",
				conformance.ConsistentHash:    "the plane has no hash",
			}
			if v.byService {
				// Of several entries for an address any may be used for a moment.
				skip[conformance.ReplaceInPlace] = "the plane has no order"
			}
			conformance.Simulate(t, conformance.Simulation{
				New: func(tb testing.TB, env conformance.SimEnv) conformance.Fake {
					p := newPlane(t, env, v)
					return conformance.Fake{Backend: p.driver, Handle: p.handle, Dump: p.dump}
				},
				Skip: skip, Worlds: 4,
			})
		})
	}
}

// world is a plane with an engine.
type world struct {
	*plane
	fail    func() error
	process ruleset.Backend
	tracker *tracker.Tracker
	cursor  *ruleset.Cursor
}

func newWorld(t *testing.T, v variant) *world {
	w := &world{fail: func() error { return nil }}
	w.plane = newPlane(t, conformance.SimEnv{Fail: func() error { return w.fail() }, Look: func() {}}, v)
	w.start()
	return w
}

// start starts a process on the plane.
func (w *world) start() {
	w.t.Helper()
	w.process = w.driver()
	var err error
	if w.tracker, err = tracker.New(tracker.Config{Node: tracker.NodeInfo{Name: "here"}}); err != nil {
		w.t.Fatal(err)
	}
	e := must.Get(ruleset.NewEngine(ruleset.Config{Source: w.tracker}))(w.t)
	w.cursor = e.Attach("plane", ruleset.BackendFunc(func(ctx context.Context, d *ruleset.Delta) error { return w.process.Apply(ctx, d) }))
	w.tracker.MarkSynced(tracker.KindServices, tracker.KindSlices, tracker.KindNodes)
}

// sync syncs and returns the writes.
func (w *world) sync(t *testing.T) string {
	t.Helper()
	w.writes = nil
	must.Do(t, w.cursor.Sync(t.Context()))
	return strings.Join(w.writes, ", ")
}

// set gives a Service endpoints.
func (w *world) set(n string, eps ...string) {
	w.tracker.SetService(service(n, "10.96.0."+n))
	w.tracker.SetSlice(slice(n, eps...))
}

// refuse makes the plane refuse the writes of one Service's frontend.
func (w *world) refuse(n string) {
	w.refused = map[any]bool{driver.Frontend{Addr: netip.MustParseAddr("10.96.0." + n), Port: 80, Protocol: v1.ProtocolTCP, Family: tracker.IPv4}: true}
}

// TestDriverWritesOnlyWhatDiffers names the writes of single changes and of a restart.
func TestDriverWritesOnlyWhatDiffers(t *testing.T) {
	w := newWorld(t, variant{})
	for _, step := range []struct {
		do   func()
		want string
	}{
		{func() { w.set("1", "10.0.0.1", "10.0.0.2") }, "put endpoint, put endpoint, put address, put pool, put frontend"},
		{func() { w.start(); w.set("1", "10.0.0.1", "10.0.0.2") }, ""},
		{func() { w.set("1", "10.0.0.1", "10.0.0.3") }, "put endpoint, put pool, delete endpoint"},
		{func() { w.set("1") }, "put frontend, delete pool, delete endpoint, delete endpoint"},
		{func() { w.set("1", "10.0.0.1") }, "put endpoint, put pool, put frontend"},
		{func() { w.set("2", "10.0.0.1") }, "put address, put pool, put frontend"},
		{func() { w.tracker.DeleteService(name("1")) }, "delete frontend, delete pool, delete address"},
		{func() { w.tracker.DeleteService(name("2")) }, "delete frontend, delete pool, delete address, delete endpoint"},
	} {
		step.do()
		if got := w.sync(t); got != step.want {
			t.Errorf("writes %q, want %q", got, step.want)
		}
	}
	if len(w.pools)+len(w.frontends)+len(w.endpoints)+len(w.addresses) != 0 {
		t.Errorf("left: %s", w.dump())
	}
}

// TestSlotsChangeOnlyWhatTheyMust counts the writes of changes of a pool of 100 endpoints.
func TestSlotsChangeOnlyWhatTheyMust(t *testing.T) {
	w := newWorld(t, variant{slots: true})
	var eps []string
	for i := range 100 {
		eps = append(eps, fmt.Sprint("10.0.0.", i))
	}
	w.set("1", eps...)
	w.sync(t)
	for _, step := range []struct {
		do   func()
		want string
	}{
		{func() { eps[7] = "10.0.1.0" }, "put endpoint, put slot, delete endpoint"},
		{func() { eps = append(eps[:50], eps[51:]...) }, "put slot, put frontend, delete slot, delete endpoint"},
		{func() { eps = eps[:len(eps)-1] }, "put frontend, delete slot, delete endpoint"},
		{func() { w.start() }, ""},
	} {
		step.do()
		w.set("1", eps...)
		got := w.sync(t)
		// Slots are in the order of changes, so the removed endpoint may be another one than the last.
		if strings.Replace(got, "put slot, put frontend", "put frontend", 1) != strings.Replace(step.want, "put slot, put frontend", "put frontend", 1) {
			t.Errorf("writes %q, want %q", got, step.want)
		}
	}
}

// TestListsOfAPoolFollowEachOther has the endpoints of two nodes in one pool.
func TestListsOfAPoolFollowEachOther(t *testing.T) {
	p := newPlane(t, conformance.SimEnv{Fail: func() error { return nil }, Look: func() {}}, variant{})
	m := map[driver.Slot[int]]string{}
	slots := &driver.Slots[int, string]{Table: *table(p, "slot", m)}
	lists := [][]string{{"a", "b"}, {"x", "y", "y"}}
	size := 0
	d, err := driver.New(driver.Plane{Tables: []driver.Ordered{slots}, Want: func(*ruleset.Port) { size = slots.WantPool(1, lists...) }})
	if err != nil {
		t.Fatal(err)
	}
	apply := func(want ...string) {
		t.Helper()
		s := &ruleset.Port{}
		must.Do(t, d.Apply(t.Context(), &ruleset.Delta{Node: &ruleset.Node{}, Changes: []ruleset.Change{{New: s}}}))
		for i, v := range want {
			if m[driver.Slot[int]{Pool: 1, N: i}] != v {
				t.Errorf("slots %v, want %q", m, want)
			}
		}
		if len(m) != len(want) || size != len(want) {
			t.Errorf("%d slots of %d, want %q", len(m), size, want)
		}
	}
	apply("a", "b", "x", "y", "y")
	lists = [][]string{{"c", "b"}, {"y", "x"}}
	apply("c", "b", "x", "y")
}

// TestServiceTakesOneCallPerTable adds and deletes a Service with many endpoints in a data plane with
// batches.
func TestServiceTakesOneCallPerTable(t *testing.T) {
	w := newWorld(t, variant{batches: true})
	var eps []string
	for i := range 100 {
		eps = append(eps, fmt.Sprint("10.0.0.", i))
	}
	w.set("1", eps...)
	w.sync(t)
	w.tracker.DeleteService(name("1"))
	if w.sync(t); w.calls != 8 || len(w.endpoints) != 0 {
		t.Errorf("%d calls for four tables, to add and to delete a Service", w.calls)
	}
}

// TestFailedServiceAffectsNoOther refuses one Service of a hundred from the first delta on, in a plane
// that can read its tables and in one that cannot.
func TestFailedServiceAffectsNoOther(t *testing.T) {
	for _, v := range []variant{{}, {unreadable: true}} {
		t.Run(fmt.Sprintf("%+v", v), func(t *testing.T) {
			w := newWorld(t, v)
			w.refuse("7")
			const n = 100
			for i := range n {
				w.set(fmt.Sprint(i), fmt.Sprintf("10.0.0.%d", i))
			}
			sync := func() int {
				t.Helper()
				w.writes = nil
				partial := (*ruleset.PartialError)(nil)
				if err := w.cursor.Sync(t.Context()); !errors.As(err, &partial) || len(partial.Failed) != 1 || !strings.Contains(err.Error(), "ns/7") {
					t.Fatalf("error %v, want one that names ns/7", err)
				}
				return len(w.writes)
			}
			sync()
			w.set("5", "10.0.1.5")
			if got := sync(); got != 3 {
				t.Errorf("%d writes for one endpoint", got)
			}
			w.tracker.DeleteService(name("6"))
			if got := sync(); got != 4 || len(w.pools) != n-1 || len(w.endpoints) != n-1 || len(w.addresses) != n-1 {
				t.Errorf("%d writes for a deleted Service; left %d pools, %d endpoints, %d addresses", got, len(w.pools), len(w.endpoints), len(w.addresses))
			}
			if got := sync(); got != 0 {
				t.Errorf("%d writes without a change", got)
			}
			w.cursor.Resync()
			if got, want := sync(), map[bool]int{true: 4*(n-1) - 1}[v.unreadable]; got != want {
				t.Errorf("%d writes after Resync, want %d", got, want)
			}
			w.refused = nil
			if got := w.sync(t); got != "put frontend" || len(w.frontends) != n-1 {
				t.Errorf("writes %q when nothing is refused", got)
			}
		})
	}
}

// TestStaleEntryThatStaysIsAnError fails the deletion of an entry of an earlier process.
func TestStaleEntryThatStaysIsAnError(t *testing.T) {
	w := newWorld(t, variant{})
	stale := driver.Frontend{Addr: netip.MustParseAddr("10.96.0.9"), Port: 80, Protocol: v1.ProtocolTCP, Family: tracker.IPv4}
	w.frontends[stale] = entry{}
	w.addresses[stale.Addr] = struct{}{}
	w.refuse("9")
	w.set("1", "10.0.0.1")
	partial := (*ruleset.PartialError)(nil)
	if err := w.cursor.Sync(t.Context()); !errors.Is(err, errRefused) || errors.As(err, &partial) || len(w.frontends) != 2 || len(w.addresses) != 2 {
		t.Fatalf("error %v, %s", err, w.dump())
	}
	w.refused = nil
	if got := w.sync(t); got != "delete frontend, delete address" {
		t.Errorf("writes %q", got)
	}
}

// TestNumbersSurviveResyncAndRestart removes entries behind the Driver, which writes them again under
// their numbers, and adds a second pool of one name, which goes.
func TestNumbersSurviveResyncAndRestart(t *testing.T) {
	w := newWorld(t, variant{})
	for _, n := range []string{"1", "2", "3"} {
		w.set(n, "10.0.0."+n)
	}
	w.sync(t)
	before := fmt.Sprint(w.pools, w.endpoints)
	for id, g := range w.pools {
		delete(w.pools, id)
		w.pools[id+100] = g
		break
	}
	w.cursor.Resync()
	if got := w.sync(t); got != "put pool, delete pool" || fmt.Sprint(w.pools, w.endpoints) != before {
		t.Errorf("writes %q, tables %v, before %s", got, w.pools, before)
	}
	w.tracker.DeleteService(name("1"))
	w.sync(t)
	before = fmt.Sprint(w.pools, w.endpoints)
	w.start()
	w.set("3", "10.0.0.3")
	w.set("2", "10.0.0.2")
	if got := w.sync(t); got != "" || fmt.Sprint(w.pools, w.endpoints) != before {
		t.Errorf("writes %q after a restart, tables %v, before %s", got, w.pools, before)
	}
}

// TestNumberIsFreeWhenItsEntryIsGone has room for one number. A Service without one fails until another Service is
// removed, whose entry was written or not.
func TestNumberIsFreeWhenItsEntryIsGone(t *testing.T) {
	for _, fails := range []bool{false, true} {
		m, fail := map[uint32]string{}, errRefused
		entries := &driver.Numbered[string, string]{Low: 1, High: 1, Name: func(v string) string { return v }, Table: driver.Table[uint32, string]{
			Put: func(id uint32, v string) error {
				if !fails || v != "a" {
					m[id] = v
					return nil
				}
				return fail
			},
			Delete: func(id uint32) error { delete(m, id); return nil },
		}}
		d, err := driver.New(driver.Plane{Tables: []driver.Ordered{entries}, Want: func(s *ruleset.Port) { entries.Want(s.Key.Name) }})
		if err != nil {
			t.Fatal(err)
		}
		apply := func(n string, wanted bool) error {
			c := ruleset.Change{}
			if c.Key.Name = n; wanted {
				c.New = &ruleset.Port{Key: c.Key}
			}
			return d.Apply(t.Context(), &ruleset.Delta{Changes: []ruleset.Change{c}})
		}
		if err := apply("a", true); (err != nil) != fails {
			t.Errorf("error %v", err)
		}
		if partial := (*ruleset.PartialError)(nil); !errors.As(apply("b", true), &partial) {
			t.Error("there is a second number")
		}
		if err := errors.Join(apply("a", false), apply("b", true)); err != nil || m[1] != "b" {
			t.Errorf("entries %v, error %v", m, err)
		}
	}
}

// change makes a random change to one of a few Services, which share external addresses and
// take frontends from each other.
func (w *world) change(r *rand.Rand) {
	i := r.IntN(4)
	switch n := fmt.Sprint("s", i); r.IntN(5) {
	case 0:
		w.tracker.DeleteService(name(n))
	case 1, 2:
		s := service(n, fmt.Sprint("10.96.0.", i+1))
		s.Spec.Type = v1.ServiceTypeNodePort
		s.Spec.ExternalIPs = []string{fmt.Sprint("203.0.113.", r.IntN(2))}
		s.Spec.ExternalTrafficPolicy = []v1.ServiceExternalTrafficPolicy{"Local", "Cluster"}[r.IntN(2)]
		s.Spec.Ports[0].Port, s.Spec.Ports[0].NodePort = int32(80+r.IntN(2)), int32(30080+r.IntN(3))
		w.tracker.SetService(s)
	default:
		s := slice(n)
		for e := range 4 {
			if r.IntN(2) == 0 {
				node := []string{"here", "there"}[e%2]
				s.Endpoints = append(s.Endpoints, slice("", fmt.Sprint("10.0.0.", e+1)).Endpoints...)
				s.Endpoints[len(s.Endpoints)-1].NodeName = &node
			}
		}
		w.tracker.SetSlice(s)
	}
}

// agree compares the plane with one that an empty process writes.
func (w *world) agree() {
	w.t.Helper()
	want := newPlane(w.t, conformance.SimEnv{Fail: func() error { return nil }, Look: func() {}}, w.variant)
	d := &ruleset.Delta{Full: true, Node: w.node}
	for i := range 4 {
		k := tracker.Key{ServicePortName: tracker.ServicePortName{NamespacedName: name(fmt.Sprint("s", i)), Protocol: v1.ProtocolTCP}, Family: tracker.IPv4}
		if s := w.cursor.Port(k); s != nil {
			d.Changes = append(d.Changes, ruleset.Change{Key: k, New: s})
		}
	}
	must.Do(w.t, want.driver().Apply(w.t.Context(), d))
	if got, want := w.dump(), want.dump(); got != want {
		w.t.Errorf("the plane has\n%s\nand should have\n%s", got, want)
	}
}

// TestRandomWritesFail fails random writes of planes of all variants, cancels deltas, and restarts and resyncs. Once no write
// fails, the plane has what the Services want and nothing else. A flow that a Service lost meanwhile
// must lead to an endpoint of one of its owners.
func TestRandomWritesFail(t *testing.T) {
	agreed := 0
	for seed := range uint64(400) {
		r := rand.New(rand.NewPCG(seed, 4))
		bit := func(n int) bool { return seed>>n&1 == 0 }
		w := newWorld(t, variant{slots: bit(0), byService: bit(1), batches: bit(2), replace: bit(3), unreadable: seed%7 == 6})
		ctx, cancel := context.WithCancel(t.Context())
		failing := true
		w.fail = func() error {
			if failing && r.IntN(150) == 0 {
				cancel()
			}
			if failing && r.IntN(6) == 0 {
				return errRefused
			}
			return nil
		}
		for step := range 40 {
			w.change(r)
			switch r.IntN(20) {
			case 0, 1:
				w.cursor.Resync()
			case 2:
				if !w.variant.unreadable {
					w.process = w.driver()
					w.cursor.Resync()
				}
			}
			failing = step%8 != 7
			err := w.cursor.Sync(ctx)
			if ctx.Err() != nil {
				ctx, cancel = context.WithCancel(t.Context())
				continue
			}
			if err != nil && (!failing || !errors.Is(err, errRefused)) {
				t.Fatal(err)
			}
			if err == nil {
				agreed++
				w.agree()
			}
			if t.Failed() {
				t.Fatalf("seed %d, step %d, %+v: %v", seed, step, w.variant, err)
			}
		}
		cancel()
	}
	if agreed < 3000 {
		t.Errorf("only %d syncs without an error", agreed)
	}
}

// TestIncompletePlaneIsRejected leaves out what New requires.
func TestIncompletePlaneIsRejected(t *testing.T) {
	want := func(*ruleset.Port) {}
	for _, p := range []driver.Plane{
		{},
		{Want: want, Tables: []driver.Ordered{&driver.Table[int, int]{Put: func(int, int) error { return nil }}}},
		{Want: want, Tables: []driver.Ordered{&driver.Slots[int, int]{}}},
		{Want: want, Tables: []driver.Ordered{&driver.Numbered[int, int]{Low: 2, High: 1}}},
	} {
		if _, err := driver.New(p); !errors.Is(err, ruleset.ErrConfig) {
			t.Errorf("error %v", err)
		}
	}
	d := must.Get(driver.New(driver.Plane{Want: want, Limits: ruleset.Limits{Endpoints: 7}}))(t)
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := d.Apply(ctx, &ruleset.Delta{}); !errors.Is(err, context.Canceled) || d.Limits(tracker.IPv4).Endpoints != 7 {
		t.Errorf("error %v", err)
	}
}
