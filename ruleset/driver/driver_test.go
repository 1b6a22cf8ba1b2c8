package driver_test

import (
	"context"
	"errors"
	"fmt"
	"iter"
	"maps"
	"net/netip"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	v1 "k8s.io/api/core/v1"

	"github.com/go-proxier/proxier/internal/testing/testtime"
	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/ruleset/conformance"
	"github.com/go-proxier/proxier/ruleset/driver"
	"github.com/go-proxier/proxier/tracker"
)

// entry is the value of a frontend.
type entry struct {
	service          tracker.Key
	target, internal ruleset.Target
	frontend         ruleset.Frontend
	affinity         time.Duration
}

// bucket is a part of a pool.
type bucket struct {
	endpoint driver.Endpoint
	weight   uint16
}

// plane is a data plane in memory with all tables of a driver.
type plane struct {
	env       conformance.SimEnv
	node      *ruleset.Node
	endpoints map[driver.Endpoint]string
	addresses map[netip.Addr]struct{}
	pools     map[driver.Pool][]bucket
	frontends map[driver.Frontend]entry
	writes    []string
	// variant is how the plane's tables work.
	variant variant
	// calls counts calls by their names.
	calls map[string]int
	// refused is a frontend that the plane does not write, unless it is zero.
	refused driver.Frontend
	// deleting means that the current write deletes an entry.
	deleting bool
	// unreadable means that a Driver cannot read the tables.
	unreadable bool
	t          testing.TB
}

func newPlane(t testing.TB, env conformance.SimEnv) *plane {
	return &plane{
		env: env, t: t, endpoints: map[driver.Endpoint]string{}, addresses: map[netip.Addr]struct{}{},
		pools: map[driver.Pool][]bucket{}, frontends: map[driver.Frontend]entry{},
	}
}

// variant is a set of properties of a plane.
type variant struct {
	byService, empty bool
	// batches: tables have PutAll and DeleteAll only. replace: tables have Replace.
	batches, replace bool
	// refuses: a failed Put has no effect, and its error wraps ruleset.ErrRefused.
	refuses bool
	// some: frontends without endpoints have no entry. unfit: every Service with two endpoints is
	// refused in advance.
	some, unfit bool
}

// table returns the functions of a table that is a map.
func table[K comparable, V any](p *plane, name string, m map[K]V) driver.Table[K, V] {
	write := func(text string, k K, f func()) error {
		p.deleting = strings.HasPrefix(text, "delete ")
		if err := p.env.Fail(); err != nil {
			if p.variant.refuses {
				return fmt.Errorf("%w: %w", ruleset.ErrRefused, err)
			}
			return err
		}
		if at, ok := any(k).(driver.Frontend); ok && at == p.refused && at.Addr.IsValid() {
			return errRefused
		}
		f()
		p.writes = append(p.writes, text)
		p.check()
		p.env.Look()
		return nil
	}
	out := driver.Table[K, V]{
		Installed: func() (iter.Seq2[K, V], error) { return maps.All(maps.Clone(m)), nil },
		Put:       func(k K, v V) error { return write("put "+name, k, func() { m[k] = v }) },
		Delete:    func(k K) error { return write("delete "+name, k, func() { delete(m, k) }) },
	}
	if p.unreadable {
		out.Installed = nil
	}
	put, remove := out.Put, out.Delete
	if p.variant.replace {
		out.Replace = func(k K, old, now V) error {
			if is, ok := m[k]; !ok || !reflect.DeepEqual(is, old) {
				p.t.Errorf("%s %v is %v, and not %v", name, k, is, old)
			}
			p.count("replace " + name)
			return put(k, now)
		}
	}
	if p.variant.batches {
		out.Put, out.Delete = nil, nil
		out.PutAll = func(keys []K, values []V) (err error) {
			p.count("put " + name)
			for i, k := range keys {
				if err = put(k, values[i]); err != nil {
					if i != 0 && errors.Is(err, ruleset.ErrRefused) {
						err = errors.New("half of a batch")
					}
					return err
				}
			}
			return nil
		}
		out.DeleteAll = func(keys []K) error {
			p.count("delete " + name)
			for _, k := range keys {
				if err := remove(k); err != nil {
					return err
				}
			}
			return nil
		}
	}
	return out
}

func (p *plane) count(call string) {
	if p.calls == nil {
		p.calls = map[string]int{}
	}
	p.calls[call]++
}

var errRefused = errors.New("refused")

// check fails the test if something refers to a missing entry.
func (p *plane) check() {
	for at, b := range p.pools {
		for _, b := range b {
			if _, ok := p.endpoints[b.endpoint]; !ok {
				p.t.Errorf("pool %v refers to the missing endpoint %v", at, b.endpoint)
			}
		}
	}
	for at, e := range p.frontends {
		for _, t := range []ruleset.Target{e.target, e.internal} {
			if _, ok := p.pools[driver.Pool{Service: e.service, Target: t}]; !ok && (t == ruleset.TargetCluster || t == ruleset.TargetLocal) {
				p.t.Errorf("frontend %v refers to the missing %v", at, t)
			}
		}
		if _, ok := p.addresses[at.Addr]; !ok && at.Addr.IsValid() {
			p.t.Errorf("frontend %v has no address", at)
		}
	}
}

func (p *plane) driver() ruleset.Backend {
	v := p.variant
	plane := driver.Tables[string, []bucket, entry]{
		Node:      func(n *ruleset.Node) error { p.node = n; return nil },
		Endpoints: table(p, "endpoint", p.endpoints),
		Addresses: table(p, "address", p.addresses),
		Pools:     table(p, "pool", p.pools),
		Frontends: table(p, "frontend", p.frontends),
		Pool: func(s *ruleset.Port, t ruleset.Target) (out []bucket) {
			for _, ep := range s.Pool(t) {
				out = append(out, bucket{driver.EndpointOf(s, ep), ep.Weight})
			}
			return out
		},
		Frontend: func(s *ruleset.Port, f *ruleset.Frontend) entry {
			return entry{service: s.Key, target: f.Target, internal: f.Internal, frontend: *f, affinity: s.Spec.Affinity}
		},
		Endpoint:   func(_ *ruleset.Port, ep *tracker.Endpoint) string { return ep.Node },
		EmptyPools: v.empty,
		ByService:  v.byService,
	}
	if v.some {
		plane.HasFrontend = func(s *ruleset.Port, f *ruleset.Frontend) bool { return len(s.Pool(f.Target)) != 0 }
		plane.HasAddress = plane.HasFrontend
	}
	if v.unfit {
		plane.Refuse = func(s *ruleset.Port) error {
			if len(s.Selection.Reachable) == 2 {
				return errRefused
			}
			return nil
		}
	}
	d, err := driver.New(plane)
	if err != nil {
		p.t.Fatal(err)
	}
	return d
}

func (p *plane) handle(pk ruleset.Packet) conformance.Outcome {
	if p.node == nil {
		return conformance.Outcome{}
	}
	at := driver.Frontend{Addr: pk.To.Addr(), Port: pk.To.Port(), Protocol: pk.Protocol, Family: tracker.FamilyOf(pk.To.Addr())}
	find := func(at driver.Frontend) (found []entry) {
		for k, e := range p.frontends {
			if k.Service = (tracker.Key{}); k == at {
				found = append(found, e)
			}
		}
		return found
	}
	found := find(at)
	if len(found) == 0 && slices.Contains(pk.NodeAddresses, at.Addr) && p.node.NodePorts(at.Family).Allows(at.Addr) {
		at.Addr = netip.Addr{}
		found = find(at)
	}
	if len(found) == 0 {
		return conformance.Outcome{}
	}
	e := found[0]
	fromPod, fromNode := p.node.LocalTraffic.Recognizes(pk.From, pk.InInterface), pk.InInterface == ""
	target := e.frontend.TargetFor(fromPod || fromNode)
	switch {
	case !e.frontend.Admits(pk.From), target == ruleset.TargetDrop:
		return conformance.Outcome{Action: ruleset.ActionDrop}
	case target == ruleset.TargetReject:
		return conformance.Outcome{Action: ruleset.ActionReject}
	}
	out := conformance.Outcome{Action: ruleset.ActionForward, Affinity: e.affinity}
	for _, b := range p.pools[driver.Pool{Service: e.service, Target: target}] {
		out.Endpoints = append(out.Endpoints, conformance.Choice{
			Addr: b.endpoint.Addr, Weight: int(b.weight),
			Masquerade: e.frontend.Masquerade.Applies(fromPod, fromNode) || b.endpoint.Addr.Addr() == pk.From,
		})
	}
	return out
}

func (p *plane) dump() string {
	lines := []string{fmt.Sprintln("pools", p.pools), fmt.Sprintln("endpoints", p.endpoints), fmt.Sprintln("addresses", p.addresses)}
	for at, e := range p.frontends {
		lines = append(lines, fmt.Sprintln(at, e))
	}
	return strings.Join(slices.Sorted(slices.Values(lines)), "")
}

// TestDriverPassesConformance drives a data plane with every table. After each write, nothing
// may refer to a missing entry. The short form has the variants that replace entries;
// TestFrontendMayContainWhatPoolsStored has tables without Replace.
func TestDriverPassesConformance(t *testing.T) {
	variants := []variant{
		{empty: true, replace: true}, {byService: true}, {empty: true, batches: true}, {byService: true, batches: true, replace: true},
	}
	if !testtime.Thorough() {
		variants = []variant{variants[0], variants[3]}
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
					p := newPlane(t, env)
					p.variant = v
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
	fail    error
	tracker *tracker.Tracker
	cursor  *ruleset.Cursor
	// half holds the Services that may be half written.
	half map[tracker.Key]bool
}

func newWorld(t *testing.T, empty bool) *world {
	w := &world{half: map[tracker.Key]bool{}}
	w.plane = newPlane(t, conformance.SimEnv{Fail: func() error { return w.fail }, Look: func() {}})
	w.start(t, empty)
	return w
}

// start starts a process on the plane.
func (w *world) start(t *testing.T, empty bool) {
	t.Helper()
	var err error
	if w.tracker, err = tracker.New(tracker.Config{
		Node: tracker.NodeInfo{Name: "here"},
	}); err != nil {
		t.Fatal(err)
	}
	e, err := ruleset.NewEngine(ruleset.Config{Source: w.tracker})
	if err != nil {
		t.Fatal(err)
	}
	w.variant.empty = empty
	w.cursor = e.Attach("plane", watched{w, w.driver()})
	w.tracker.MarkSynced(tracker.KindServices, tracker.KindSlices, tracker.KindNodes)
}

// sync syncs and returns the writes.
func (w *world) sync(t *testing.T) []string {
	t.Helper()
	w.writes = nil
	if err := w.cursor.Sync(t.Context()); err != nil {
		t.Fatal(err)
	}
	return w.writes
}

// TestDriverWritesOnlyWhatDiffers counts the writes of single changes and of a restart.
func TestDriverWritesOnlyWhatDiffers(t *testing.T) {
	w := newWorld(t, true)
	set := func(eps ...string) {
		w.tracker.SetService(service("web", "10.96.0.1"))
		w.tracker.SetSlice(slice("web", eps...))
	}
	for _, step := range []struct {
		do   func()
		want string
	}{
		{func() { set("10.0.0.1", "10.0.0.2") }, "put endpoint, put endpoint, put address, put pool, put frontend"},
		{func() { w.start(t, true); set("10.0.0.1", "10.0.0.2") }, ""},
		{func() { set("10.0.0.1", "10.0.0.3") }, "put endpoint, put pool, delete endpoint"},
		{func() { set() }, "put frontend, put pool, delete endpoint, delete endpoint"},
		{func() { set("10.0.0.1") }, "put endpoint, put pool, put frontend"},
		{func() { w.tracker.DeleteService(name("web")) }, "delete frontend, delete pool, delete endpoint, delete address"},
	} {
		step.do()
		if got := strings.Join(w.sync(t), ", "); got != step.want {
			t.Errorf("writes %q, want %q", got, step.want)
		}
	}
	if len(w.pools)+len(w.frontends)+len(w.endpoints)+len(w.addresses) != 0 {
		t.Errorf("left: %s", w.dump())
	}
}

// TestNodeMayRequestAllServices has frontends whose values depend on the node's zone.
func TestNodeMayRequestAllServices(t *testing.T) {
	zone, put := "", []string{}
	has := map[driver.Frontend]string{}
	d, err := driver.New(driver.Tables[struct{}, struct{}, string]{
		Node: func(n *ruleset.Node) error {
			if zone == n.Info.Zone {
				return nil
			}
			zone = n.Info.Zone
			return ruleset.ErrNeedFull
		},
		Frontends: driver.Table[driver.Frontend, string]{
			Installed: func() (iter.Seq2[driver.Frontend, string], error) { return maps.All(has), nil },
			Put: func(k driver.Frontend, v string) error {
				has[k], put = v, append(put, v)
				return nil
			},
			Delete: func(k driver.Frontend) error { delete(has, k); return nil },
		},
		Frontend: func(_ *ruleset.Port, f *ruleset.Frontend) string { return f.Addr.String() + " in " + zone },
	})
	if err != nil {
		t.Fatal(err)
	}
	tr, err := tracker.New(tracker.Config{Node: tracker.NodeInfo{Name: "here", Zone: "a"}})
	if err != nil {
		t.Fatal(err)
	}
	e, err := ruleset.NewEngine(ruleset.Config{Source: tr})
	if err != nil {
		t.Fatal(err)
	}
	cursor := e.Attach("plane", d)
	tr.MarkSynced(tracker.KindServices, tracker.KindSlices, tracker.KindNodes)
	tr.SetService(service("web", "10.96.0.1"))
	for _, now := range []struct{ zone, want string }{{"a", "10.96.0.1 in a"}, {"b", "10.96.0.1 in b"}, {"b", ""}} {
		put = nil
		tr.SetNode(tracker.NodeInfo{Name: "here", Zone: now.zone})
		if err := cursor.Sync(t.Context()); err != nil || strings.Join(put, ", ") != now.want {
			t.Errorf("in zone %s %q was written, %v, want %q", now.zone, put, err, now.want)
		}
	}
}

// TestServiceTakesOneCallPerTable adds and deletes a Service with many endpoints in a data plane with
// batches, and changes the value of an endpoint.
func TestServiceTakesOneCallPerTable(t *testing.T) {
	w := newWorld(t, false)
	w.variant = variant{batches: true, replace: true}
	w.start(t, false)
	endpoints := slice("web")
	for i := range 100 {
		endpoints.Endpoints = append(endpoints.Endpoints, slice("", fmt.Sprint("10.0.0.", i)).Endpoints...)
	}
	w.tracker.SetService(service("web", "10.96.0.1"))
	w.tracker.SetSlice(endpoints)
	step := func(want map[string]int) {
		t.Helper()
		w.calls = nil
		if w.sync(t); !maps.Equal(w.calls, want) {
			t.Errorf("calls %v, want %v", w.calls, want)
		}
	}
	step(map[string]int{"put endpoint": 1, "put address": 1, "put pool": 1, "put frontend": 1})
	moved := endpoints.DeepCopy()
	moved.Endpoints[7].NodeName = ptr("there")
	w.tracker.SetSlice(moved)
	step(map[string]int{"replace endpoint": 1})
	w.tracker.DeleteService(name("web"))
	step(map[string]int{"delete frontend": 1, "delete pool": 1, "delete endpoint": 1, "delete address": 1})
}

// TestFailureAffectsOneService fails the first write of two changes.
func TestFailureAffectsOneService(t *testing.T) {
	w := newWorld(t, false)
	w.sync(t)
	w.tracker.SetService(service("a", "10.96.0.1"))
	w.tracker.SetService(service("b", "10.96.0.2"))
	w.tracker.SetSlice(slice("a", "10.0.0.1"))
	w.tracker.SetSlice(slice("b", "10.0.0.2"))
	refused, n := errors.New("refused"), 0
	w.env.Fail = func() error {
		if n++; n == 1 {
			return refused
		}
		return nil
	}
	err := w.cursor.Sync(t.Context())
	var partial *ruleset.PartialError
	if !errors.As(err, &partial) || len(partial.Failed) != 1 || !errors.Is(err, refused) {
		t.Fatalf("error %v", err)
	}
	if len(w.frontends) != 1 {
		t.Errorf("%d frontends of the other Service", len(w.frontends))
	}
	w.sync(t)
	if len(w.frontends) != 2 {
		t.Errorf("%d frontends after a retry", len(w.frontends))
	}
}

// refuse makes the plane refuse the writes of one Service's frontends.
func (w *world) refuse(ip string) {
	w.refused = driver.Frontend{Addr: netip.MustParseAddr(ip), Port: 80, Protocol: v1.ProtocolTCP, Family: tracker.IPv4}
}

// TestRefusedServiceAffectsNoOther refuses one Service of a hundred from the first delta on, in a
// plane that can read its tables and in one that cannot. The others are acknowledged, changes cost
// what changed, and removals are not skipped.
func TestRefusedServiceAffectsNoOther(t *testing.T) {
	for _, read := range []bool{true, false} {
		t.Run(fmt.Sprintf("read=%t", read), func(t *testing.T) {
			w := newWorld(t, true)
			w.unreadable = !read
			w.start(t, true)
			w.refuse("10.96.0.7")
			const n = 100
			for i := range n {
				w.tracker.SetService(service(fmt.Sprint("s", i), fmt.Sprintf("10.96.0.%d", i)))
				w.tracker.SetSlice(slice(fmt.Sprint("s", i), fmt.Sprintf("10.0.0.%d", i)))
			}
			acked := 0
			w.cursor.OnSync(func(i ruleset.SyncInfo) { acked = i.Changes - i.Failed })
			sync := func() int {
				t.Helper()
				w.writes = nil
				err := w.cursor.Sync(t.Context())
				if partial := (*ruleset.PartialError)(nil); !errors.As(err, &partial) || len(partial.Failed) != 1 || !strings.Contains(err.Error(), "ns/s7") {
					t.Fatalf("error %v, want one that names ns/s7", err)
				}
				return len(w.writes)
			}
			if sync(); acked != n-1 {
				t.Errorf("%d Services acknowledged", acked)
			}
			w.tracker.SetSlice(slice("s5", "10.0.1.5"))
			if got := sync(); got != 3 {
				t.Errorf("%d writes for one endpoint", got)
			}
			w.tracker.DeleteService(name("s6"))
			if got := sync(); got != 4 || len(w.pools) != n-1 || len(w.endpoints) != n-1 || len(w.addresses) != n-1 {
				t.Errorf("%d writes for a deleted Service; left %d pools, %d endpoints, %d addresses", got, len(w.pools), len(w.endpoints), len(w.addresses))
			}
			if got := sync(); got != 0 {
				t.Errorf("%d writes without a change", got)
			}
			w.cursor.Resync()
			if got, want := sync(), map[bool]int{true: 0, false: 4*(n-1) - 1}[read]; got != want {
				t.Errorf("%d writes after Resync, want %d", got, want)
			}
			if got := sync(); got != 0 {
				t.Errorf("%d writes after the resync", got)
			}
			w.refused = driver.Frontend{}
			if got := w.sync(t); len(got) != 1 || len(w.frontends) != n-1 {
				t.Errorf("%d writes when nothing is refused", len(got))
			}
		})
	}
}

// TestEarlierFrontendKeepsWhatItNeeds restarts with one Service that is refused, and whose
// frontend of the earlier process stays. What that frontend may refer to stays as long, and other
// stale entries go.
func TestEarlierFrontendKeepsWhatItNeeds(t *testing.T) {
	w := newWorld(t, true)
	set := func(names ...string) {
		for _, n := range names {
			w.tracker.SetService(service(n, "10.96.0."+n))
			w.tracker.SetSlice(slice(n, "10.0.0."+n))
		}
	}
	set("1", "2", "3")
	w.sync(t)
	w.start(t, true)
	w.refuse("10.96.0.1")
	set("1", "2")
	w.tracker.SetService(func() *v1.Service {
		s := service("1", "10.96.0.1")
		s.Spec.SessionAffinity = v1.ServiceAffinityClientIP
		return s
	}())
	for i := range 2 {
		w.writes = nil
		err := w.cursor.Sync(t.Context())
		if partial := (*ruleset.PartialError)(nil); !errors.As(err, &partial) || len(partial.Failed) != 1 || partial.Pruned {
			t.Fatalf("error %v", err)
		}
		if want := []string{"delete frontend"}[i:]; !slices.Equal(w.writes, want) {
			t.Errorf("writes %q, want %q", w.writes, want)
		}
	}
	w.refused = driver.Frontend{}
	if got, want := strings.Join(w.sync(t), ", "), "put frontend, delete pool, delete endpoint, delete address"; got != want {
		t.Errorf("writes %q, want %q", got, want)
	}
}

// TestStaleEntryThatStaysFailsNoService fails the deletion of an entry of an earlier process.
func TestStaleEntryThatStaysFailsNoService(t *testing.T) {
	w := newWorld(t, true)
	stale := driver.Frontend{Addr: netip.MustParseAddr("10.96.0.9"), Port: 80, Protocol: v1.ProtocolTCP, Family: tracker.IPv4}
	w.frontends[stale] = entry{}
	w.addresses[stale.Addr] = struct{}{}
	w.refused = stale
	w.tracker.SetService(service("a", "10.96.0.1"))
	w.tracker.SetSlice(slice("a", "10.0.0.1"))
	partial := (*ruleset.PartialError)(nil)
	if err := w.cursor.Sync(t.Context()); !errors.As(err, &partial) || len(partial.Failed) != 0 || partial.Pruned || !errors.Is(err, errRefused) {
		t.Fatalf("error %v", err)
	}
	key := tracker.Key{ServicePortName: tracker.ServicePortName{NamespacedName: name("a"), Protocol: v1.ProtocolTCP}, Family: tracker.IPv4}
	if w.cursor.Port(key) == nil || len(w.frontends) != 2 {
		t.Errorf("the Service is not in effect: %s", w.dump())
	}
	w.refused = driver.Frontend{}
	if got := strings.Join(w.sync(t), ", "); got != "delete frontend, delete address" {
		t.Errorf("writes %q", got)
	}
}

// TestIncompletePlaneIsRejected leaves out what New requires.
func TestIncompletePlaneIsRejected(t *testing.T) {
	p := newPlane(t, conformance.SimEnv{})
	for _, c := range []driver.Tables[string, int, int]{
		{Endpoints: driver.Table[driver.Endpoint, string]{Put: table(p, "", p.endpoints).Put}},
		{Addresses: driver.Table[netip.Addr, struct{}]{Put: table(p, "", p.addresses).Put}},
		{Pools: table(p, "", map[driver.Pool]int{})},
		{Frontends: table(p, "", map[driver.Frontend]int{})},
	} {
		if _, err := driver.New(c); !errors.Is(err, ruleset.ErrConfig) {
			t.Errorf("error %v", err)
		}
	}
	d, err := driver.New(driver.Tables[string, int, int]{})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := d.Apply(ctx, &ruleset.Delta{}); !errors.Is(err, context.Canceled) {
		t.Errorf("error %v", err)
	}
	if got := d.Limits(tracker.IPv4); got != (ruleset.Limits{}) {
		t.Errorf("limits %v", got)
	}
}
