package ruleset

import (
	"bytes"
	"context"
	"fmt"
	"log/slog"
	"maps"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"time"

	v1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/go-proxier/proxier/tracker"
)

// budgeted returns a tracker and an engine with a Budget. Services with the annotation "hash"
// choose by a hash, and their names end up in over when they exceed the Budget.
func budgeted(t testing.TB, b Budget) (*tracker.Tracker, *Engine, map[string]int) {
	over := map[string]int{}
	c := modelConfig
	c.Budget = b
	c.OverBudget = func(k tracker.Key) { over[k.Name]++ }
	tr, e := world(t, c, tracker.NodeInfo{Name: "n1"})
	return tr, e, over
}

// many returns n addresses.
func many(net, n int) (out []string) {
	for i := range n {
		out = append(out, fmt.Sprintf("10.%d.%d.%d", net, i/250, i%250+1))
	}
	return out
}

// TestFitBoundsTheCost cuts random Services at random bounds.
func TestFitBoundsTheCost(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 2))
	cuts := 0
	for range 20_000 {
		p := &tracker.ServicePort{Key: key("a", tracker.IPv4), ClusterIP: addrs("172.30.0.1")[0], Port: 80,
			Affinity: pick[time.Duration](r, 0, time.Minute), Hash: pick(r, tracker.HashNone, tracker.HashNone, tracker.HashSource), HashBuckets: pick[uint16](r, 0, 251, 4000, 65535),
			ExternalIPs: addrs(many(1, r.IntN(6))...), LoadBalancerIPs: addrs(many(2, r.IntN(6))...), ExternalLocal: r.IntN(2) == 0}
		for _, a := range many(3, r.IntN(5)) {
			p.SourceRanges = append(p.SourceRanges, prefixes(a+"/32")...)
		}
		var eps []*tracker.Endpoint
		for i, a := range many(4, r.IntN(40)) {
			ep := endpoint(a+":80", pick(r, "n1", "n2"))
			ep.Ready, ep.Weight = true, 1
			if i == 0 {
				ep.Weight = pick[uint16](r, 1, 1, 1000)
			}
			eps = append(eps, ep)
		}
		b := Budget{Buckets: pick(r, 0, 251, 509, 4093), BucketsPerEndpoint: pick(r, 0, 100)}
		most := pick(r, 0, 1+r.IntN(100))
		s := Compile(tracker.PortState{Port: p, Endpoints: eps}, &Node{Info: tracker.NodeInfo{Name: "n1"}}, tracker.TopologyOptions{})
		out, what := b.fit(s, most)
		if out == nil {
			least := withEndpoints(withFrontends(withTable(s, 0), 1), 1)
			least.uniform = true
			if least.Cost() <= most {
				t.Fatalf("refused at %d, but a part costs %d: %s", most, least.Cost(), what)
			}
			continue
		}
		if most != 0 && out.Cost() > most {
			t.Fatalf("costs %d of %d: %s", out.Cost(), most, what)
		}
		if b.Buckets != 0 && out.HashBuckets(TargetCluster) > b.Buckets {
			t.Fatalf("%d buckets of %d", out.HashBuckets(TargetCluster), b.Buckets)
		}
		if (out == s) != (what == "") {
			t.Fatalf("changed: %v, but reported %q", out != s, what)
		}
		if out == s {
			continue
		}
		cuts++
		if n := len(s.Frontends); n != 0 && (len(out.Frontends) == 0 || out.Frontends[0].Kind != KindClusterIP) {
			t.Fatal("the cluster IP is left out")
		}
		for _, target := range []Target{TargetCluster, TargetLocal} {
			before, now := s.Pool(target), out.Pool(target)
			if len(before) != 0 && len(now) == 0 || !slices.Equal(now, before[:len(now)]) {
				t.Fatalf("%s: %d endpoints of %d", target, len(now), len(before))
			}
			for _, ep := range now {
				if !slices.Contains(out.Selection.Reachable, ep) {
					t.Fatal("Reachable lacks an endpoint of a pool")
				}
			}
		}
		if n := len(out.Selection.Reachable); n > len(out.Selection.Cluster)+len(out.Selection.Local) {
			t.Fatalf("%d reachable endpoints", n)
		}
		again, _ := b.fit(s, most)
		if diff(again, out) != 0 {
			t.Fatal("the result is not determined")
		}
	}
	if cuts < 1000 {
		t.Errorf("only %d Services were cut", cuts)
	}
}

// recorder records the deltas that it gets.
type deltaRecorder struct {
	deltas [][]string
	costs  []int
	b      Budget
	during func(n int)
	fail   func(d *Delta) error
}

func (r *deltaRecorder) Apply(_ context.Context, d *Delta) error {
	var names []string
	cost := 0
	for i := range d.Changes {
		names = append(names, d.Changes[i].Key.Name)
		cost += r.b.changedElements(&d.Changes[i])
	}
	r.deltas, r.costs = append(r.deltas, names), append(r.costs, cost)
	if r.during != nil {
		r.during(len(r.deltas))
	}
	if r.fail != nil {
		return r.fail(d)
	}
	return nil
}

// largeService returns a Service with ports p0 to pN that have endpoints at the addresses.
func setLarge(tr *tracker.Tracker, name string, ports int, addresses []string) {
	s := service(name, "172.30.9.9", func(s *v1.Service) {
		s.Spec.Ports = nil
		for i := range ports {
			s.Spec.Ports = append(s.Spec.Ports, v1.ServicePort{Name: fmt.Sprint("p", i), Port: int32(1000 + i), Protocol: v1.ProtocolTCP})
		}
	})
	tr.SetService(s)
	es := slice(name, addresses...)
	base := es.Ports[0]
	es.Ports = nil
	for i := range ports {
		p := base
		p.Name, p.Port = ptr(fmt.Sprint("p", i)), ptr(int32(8000+i))
		es.Ports = append(es.Ports, p)
	}
	tr.SetSlice(es)
}

// TestCheapChangePassesExpensiveOnes changes a small Service while a large one is offered.
func TestCheapChangePassesExpensiveOnes(t *testing.T) {
	b := Budget{Delta: 100}
	tr, e, _ := budgeted(t, b)
	r := &deltaRecorder{b: b}
	c := e.Attach("b", r)
	tr.SetService(service("victim", "172.30.0.1"))
	sync := func() {
		t.Helper()
		if err := c.Sync(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	sync()
	r.deltas, r.costs = nil, nil
	notified := 0
	e.Notify(func() { notified++ })
	setLarge(tr, "evil", 50, many(1, 40)) // 50 ports of 41 elements
	r.during = func(n int) {
		if n == 3 {
			tr.SetSlice(slice("victim", "10.0.0.1"))
		}
	}
	sync()
	if len(r.deltas) < 20 {
		t.Errorf("%d deltas", len(r.deltas))
	}
	if !slices.Contains(r.deltas[3], "victim") {
		t.Errorf("the victim's change is not in the next delta: %v", r.deltas)
	}
	if most := slices.Max(r.costs); most > 100+41 {
		t.Errorf("a delta of %d elements", most)
	}
	for _, s := range e.Snapshot().Services {
		if diff(c.Service(s.Key), s) != 0 {
			t.Errorf("%s is not in effect after one Sync", s.Key)
		}
	}
	before := len(r.deltas)
	sync()
	if len(r.deltas) != before {
		t.Error("a Sync without a change has a delta")
	}
}

// TestExpensiveChangeDoesNotStarve offers a large change while small ones keep arriving.
func TestExpensiveChangeDoesNotStarve(t *testing.T) {
	b := Budget{Delta: 100}
	tr, e, _ := budgeted(t, b)
	r := &deltaRecorder{b: b}
	c := e.Attach("b", r)
	if err := c.Sync(t.Context()); err != nil {
		t.Fatal(err)
	}
	n := 0
	churn := func() {
		for range 200 {
			n++
			tr.SetService(service(fmt.Sprint("small", n), fmt.Sprintf("172.31.%d.%d", n/250%250, n%250+1)))
		}
	}
	r.during = func(int) { churn() }
	setLarge(tr, "evil", 10, many(1, 40))
	churn()
	syncs := 0
	for e.Snapshot(); ; syncs++ {
		if err := c.Sync(t.Context()); err != nil {
			t.Fatal(err)
		}
		served := 0
		for _, s := range e.Snapshot().Services {
			if s.Key.Name == "evil" && c.Service(s.Key) != nil {
				served++
			}
		}
		if served == 10 {
			break
		}
		if syncs > 5 {
			t.Fatalf("%d of 10 ports are served after %d syncs", served, syncs)
		}
	}
	if len(r.deltas) > 60 {
		t.Errorf("%d deltas", len(r.deltas))
	}
}

// TestPoolGrowsInSeveralDeltas gives a Service many endpoints in one change.
func TestPoolGrowsInSeveralDeltas(t *testing.T) {
	b := Budget{Delta: 100}
	tr, e, _ := budgeted(t, b)
	r := &deltaRecorder{b: b}
	c := e.Attach("b", r)
	tr.SetService(service("a", "172.30.0.1"))
	tr.SetSlice(slice("a", "10.9.0.1"))
	if err := c.Sync(t.Context()); err != nil {
		t.Fatal(err)
	}
	r.deltas, r.costs = nil, nil
	last := 0
	k := e.Snapshot().Services[0].Key
	r.during = func(int) {
		n := len(c.Service(k).Selection.Cluster)
		if n < last {
			t.Errorf("%d endpoints after %d", n, last)
		}
		last = n
	}
	tr.SetSlice(slice("a", many(1, 1000)...))
	if err := c.Sync(t.Context()); err != nil {
		t.Fatal(err)
	}
	if len(r.deltas) != 10 || slices.Max(r.costs) > 110 {
		t.Errorf("%d deltas of %v elements", len(r.deltas), r.costs)
	}
	if n := len(c.Service(k).Selection.Cluster); n != 1000 {
		t.Errorf("%d endpoints", n)
	}
}

// TestRemovedPoolShrinksInSeveralDeltas removes a Service with many endpoints: its frontends at
// first, and a Service that takes its address does not wait for the rest.
func TestRemovedPoolShrinksInSeveralDeltas(t *testing.T) {
	b := Budget{Delta: 100}
	tr, e, _ := budgeted(t, b)
	r := &deltaRecorder{b: b}
	c := e.Attach("b", r)
	tr.SetService(service("a", "172.30.0.1"))
	tr.SetSlice(slice("a", many(1, 1000)...))
	if err := c.Sync(t.Context()); err != nil {
		t.Fatal(err)
	}
	a := e.Snapshot().Services[0].Key
	r.deltas, r.costs = nil, nil
	r.fail = func(d *Delta) error {
		for i := range d.Changes {
			if s := d.Changes[i].New; d.Changes[i].Key == a && s != nil && len(s.Frontends) != 0 {
				t.Errorf("the removed Service keeps %v", s.Frontends)
			}
		}
		return nil
	}
	tr.DeleteService(a.NamespacedName)
	tr.SetService(service("b", "172.30.0.1"))
	tr.SetSlice(slice("b", "10.9.0.1"))
	if err := c.Sync(t.Context()); err != nil {
		t.Fatal(err)
	}
	if len(r.deltas) != 10 || slices.Max(r.costs) > 110 {
		t.Errorf("%d deltas of %v elements", len(r.deltas), r.costs)
	}
	if first := r.deltas[0]; len(first) != 2 {
		t.Errorf("the first delta has %v", first)
	}
	r.fail = nil
	if s := c.Service(a); s != nil {
		t.Errorf("%d endpoints are left", len(s.Selection.Cluster))
	}
	// It returns while it shrinks.
	tr.SetService(service("a", "172.30.0.2"))
	tr.SetSlice(slice("a", many(1, 1000)...))
	if err := c.Sync(t.Context()); err != nil {
		t.Fatal(err)
	}
	n := 0
	r.during = func(int) {
		if n++; n == 3 {
			tr.SetService(service("a", "172.30.0.2"))
		}
	}
	tr.DeleteService(a.NamespacedName)
	for range 2 {
		if err := c.Sync(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	if s := c.Service(a); s == nil || len(s.Frontends) != 1 || len(s.Selection.Cluster) != 1000 {
		t.Errorf("the Service that returned is %+v", s)
	}
}

// TestFailedDeltaLeavesTheRestForTheNextSync fails in the middle.
func TestFailedDeltaLeavesTheRestForTheNextSync(t *testing.T) {
	b := Budget{Delta: 100}
	tr, e, _ := budgeted(t, b)
	r := &deltaRecorder{b: b}
	c := e.Attach("b", r)
	if err := c.Sync(t.Context()); err != nil {
		t.Fatal(err)
	}
	setLarge(tr, "evil", 20, many(1, 40))
	notified := 0
	e.Notify(func() { notified++ })
	r.fail = func(d *Delta) error {
		if len(r.deltas) == 4 {
			return &PartialError{Failed: map[tracker.Key]error{d.Changes[0].Key: errInjected}}
		}
		return nil
	}
	if err := c.Sync(t.Context()); err == nil || notified == 0 {
		t.Fatalf("error %v, %d notifications", err, notified)
	}
	if err := c.Sync(t.Context()); err != nil {
		t.Fatal(err)
	}
	for _, s := range e.Snapshot().Services {
		if diff(c.Service(s.Key), s) != 0 {
			t.Errorf("%s is not in effect", s.Key)
		}
	}
}

// TestTotalKeepsTheRulesOfOthers uses up a Budget that does not bound namespaces.
func TestTotalKeepsTheRulesOfOthers(t *testing.T) {
	tr, e, over := budgeted(t, Budget{Total: 10})
	served := func() string {
		var out []string
		for _, s := range e.Snapshot().Services {
			out = append(out, fmt.Sprintf("%s:%d", s.Key.Name, len(s.Selection.Cluster)))
		}
		slices.Sort(out)
		return strings.Join(out, " ")
	}
	for _, step := range []struct {
		what string
		do   func()
		want string
	}{
		{"a victim", func() { tr.SetService(service("v", "172.30.0.1")); tr.SetSlice(slice("v", many(1, 3)...)) }, "v:3"},
		{"an attacker gets what is left", func() { tr.SetService(service("a", "172.30.0.2")); tr.SetSlice(slice("a", many(2, 100)...)) }, "a:5 v:3"},
		{"another gets nothing", func() { tr.SetService(service("b", "172.30.0.3")); tr.SetSlice(slice("b", many(3, 1)...)) }, "a:5 v:3"},
		{"the victim replaces an endpoint", func() { tr.SetSlice(slice("v", "10.1.0.1", "10.1.0.2", "10.1.0.9")) }, "a:5 v:3"},
		{"the victim grows in vain", func() { tr.SetSlice(slice("v", many(1, 4)...)) }, "a:5 v:3"},
		{"the victim loses endpoints", func() { tr.SetSlice(slice("v", many(1, 1)...)) }, "a:5 b:1 v:1"},
		{"the attacker goes", func() { tr.DeleteService(name("a")) }, "b:1 v:1"},
		{"the victim grows", func() { tr.SetSlice(slice("v", many(1, 4)...)) }, "b:1 v:4"},
		{"everything goes", func() { tr.DeleteService(name("b")); tr.DeleteService(name("v")) }, ""},
	} {
		step.do()
		if got := served(); got != step.want {
			t.Errorf("%s: served %q, want %q", step.what, got, step.want)
		}
	}
	if e.total.used != 0 || len(e.waiting) != 0 || over["a"] == 0 || over["b"] == 0 {
		t.Errorf("used %d, waiting %d, over %v", e.total.used, len(e.waiting), over)
	}
}

// TestOrderOfArrivalDoesNotDecide starts engines whose objects exceed the Budget.
func TestOrderOfArrivalDoesNotDecide(t *testing.T) {
	var want string
	for seed := range uint64(20) {
		tr, e, _ := budgeted(t, Budget{Total: 20})
		for _, i := range rand.New(rand.NewPCG(seed, 0)).Perm(10) {
			tr.SetService(service(fmt.Sprint("s", i), fmt.Sprintf("172.30.0.%d", i+1)))
			tr.SetSlice(slice(fmt.Sprint("s", i), many(i, 4)...))
		}
		var got []string
		for _, s := range e.Snapshot().Services {
			got = append(got, fmt.Sprintf("%s:%d", s.Key.Name, len(s.Selection.Cluster)))
		}
		slices.Sort(got)
		if want == "" {
			want = fmt.Sprint(got)
		}
		if fmt.Sprint(got) != want || len(got) == 10 {
			t.Fatalf("served %v, want %s", got, want)
		}
	}
}

// tenant sets and deletes the objects of one namespace.
type tenant struct {
	tr        *tracker.Tracker
	namespace string
	// net is part of the addresses, which differ between tenants.
	net int
}

// set sets Service i, which is older than Service i+1, and n endpoints.
func (o tenant) set(i, n int) {
	s := service(fmt.Sprint("s", i), fmt.Sprintf("172.%d.%d.%d", 30+o.net, i/250, i%250+1))
	s.Namespace, s.CreationTimestamp = o.namespace, metav1.Unix(int64(1000+i), 0)
	o.tr.SetService(s)
	es := slice(s.Name, many(o.net, n)...)
	es.Namespace = o.namespace
	o.tr.SetSlice(es)
}

func (o tenant) delete(i int) {
	o.tr.DeleteService(types.NamespacedName{Namespace: o.namespace, Name: fmt.Sprint("s", i)})
}

// endpointsOf returns the Services that have rules, with the numbers of their endpoints.
func endpointsOf(e *Engine) string {
	var out []string
	for _, s := range e.Snapshot().Services {
		out = append(out, fmt.Sprintf("%s/%s:%d", s.Key.Namespace, s.Key.Name, len(s.Selection.Cluster)))
	}
	slices.Sort(out)
	return strings.Join(out, " ")
}

// TestNamespaceLeavesTheTotalToOthers runs an attacker who would use up the Budget's Total.
func TestNamespaceLeavesTheTotalToOthers(t *testing.T) {
	b := Budget{Total: 40, Namespace: 10}
	tr, e, over := budgeted(t, b)
	evil, victim, other := tenant{tr, "evil", 1}, tenant{tr, "victim", 2}, tenant{tr, "other", 3}
	for _, step := range []struct {
		what string
		do   func()
		want string
	}{
		{"a victim", func() { victim.set(15, 3) }, "victim/s15:3"},
		{"an attacker fills its namespace", func() {
			for i := range 10 {
				evil.set(i, 20)
			}
		}, "evil/s0:9 victim/s15:3"},
		{"the victim grows", func() { victim.set(15, 7) }, "evil/s0:9 victim/s15:7"},
		{"a new Service of the victim", func() { victim.set(16, 1) }, "evil/s0:9 victim/s15:7 victim/s16:1"},
		{"a new victim", func() { other.set(0, 9) }, "evil/s0:9 other/s0:9 victim/s15:7 victim/s16:1"},
		{"the attacker's endpoints go", func() { evil.set(0, 4) }, "evil/s0:4 evil/s1:4 other/s0:9 victim/s15:7 victim/s16:1"},
		{"they return, and no Service loses rules", func() { evil.set(0, 20) }, "evil/s0:4 evil/s1:4 other/s0:9 victim/s15:7 victim/s16:1"},
		{"the attacker's first Service goes, and one without rules comes first", func() { evil.delete(0) }, "evil/s1:4 evil/s2:4 other/s0:9 victim/s15:7 victim/s16:1"},
	} {
		step.do()
		if got := endpointsOf(e); got != step.want {
			t.Errorf("%s:\n got %q\nwant %q", step.what, got, step.want)
		}
	}
	for seed := range uint64(20) {
		tr, e, _ := budgeted(t, b)
		evil, victim, other := tenant{tr, "evil", 1}, tenant{tr, "victim", 2}, tenant{tr, "other", 3}
		do := []func(){func() { victim.set(15, 7) }, func() { victim.set(16, 1) }, func() { other.set(9, 9) }}
		for i := range 10 {
			do = append(do, func() { evil.set(i, 3) })
		}
		rand.New(rand.NewPCG(seed, 0)).Shuffle(len(do), func(i, j int) { do[i], do[j] = do[j], do[i] })
		for _, f := range do {
			f()
		}
		if got, want := endpointsOf(e), "evil/s0:3 evil/s1:3 evil/s2:1 other/s9:9 victim/s15:7 victim/s16:1"; got != want {
			t.Fatalf("after a restart:\n got %q\nwant %q", got, want)
		}
	}
	if over["s9"] == 0 || over["s15"]+over["s16"] != 0 {
		t.Errorf("over the budget: %v", over)
	}
}

// TestServiceBeyondItsNamespaceIsReportedOnce reads the log and the events.
func TestServiceBeyondItsNamespaceIsReportedOnce(t *testing.T) {
	var logged bytes.Buffer
	var ev events
	tr, err := tracker.New(tracker.Config{Node: tracker.NodeInfo{Name: "n1"}, Events: &ev})
	if err != nil {
		t.Fatal(err)
	}
	e, err := NewEngine(Config{Tracker: tr, Budget: Budget{Namespace: 10}, Log: slog.New(slog.NewTextHandler(&logged, nil))})
	if err != nil {
		t.Fatal(err)
	}
	tr.MarkSynced(tracker.SourceServices, tracker.SourceSlices, tracker.SourceNodes)
	a := tenant{tr, "a", 1}
	a.set(0, 20)
	a.set(1, 1)
	e.Snapshot()
	for i := range 10 { // the same content
		tr.SetNode(tracker.NodeInfo{Name: "n1", Zone: fmt.Sprint(i)})
		a.set(1, 1)
		a.set(0, 20)
		e.Snapshot()
	}
	want := []string{
		`Service/s0  true ProxyLimitExceeded: port "p" (IPv4): beyond the budget of the namespace: it costs 21 elements, at most 10 are allowed; left out: 11 of 20 endpoints`,
		`Service/s1  true ProxyLimitExceeded: port "p" (IPv4): beyond the budget of the namespace: no element is left`,
	}
	if got := ev.take(); !slices.Equal(got, want) {
		t.Errorf("events\n got %q\nwant %q", got, want)
	}
	if n := strings.Count(logged.String(), "\n"); n != 2 {
		t.Errorf("%d lines:\n%s", n, &logged)
	}
}

// TestPortBehindAWaitingOneGetsElements removes a port that needs more than is left.
func TestPortBehindAWaitingOneGetsElements(t *testing.T) {
	tr, e, _ := budgeted(t, Budget{Total: 10})
	a := tenant{tr, "a", 1}
	a.set(0, 4)
	a.set(1, 9)
	e.Snapshot()
	a.set(2, 1)
	a.set(0, 3)
	if got, want := endpointsOf(e), "a/s0:3 a/s1:4"; got != want {
		t.Errorf("one element for a Service that needs two: got %q, want %q", got, want)
	}
	a.delete(2)
	if got, want := endpointsOf(e), "a/s0:3 a/s1:5"; got != want {
		t.Errorf("that Service goes: got %q, want %q", got, want)
	}
}

// TestWaitingPortsCostNothing changes one port while many others wait for elements.
func TestWaitingPortsCostNothing(t *testing.T) {
	tr, e, over := budgeted(t, Budget{Total: 1000, Namespace: 100})
	evil, victim := tenant{tr, "evil", 1}, tenant{tr, "victim", 2}
	for i := range 500 {
		evil.set(i, 10)
	}
	victim.set(1000, 5)
	e.Snapshot()
	if n := len(e.waiting); n < 480 {
		t.Fatalf("%d ports wait", n)
	}
	clear(over)
	for n := range 10 {
		victim.set(1000, n%5+1)
		e.Snapshot()
	}
	if len(over) != 0 {
		t.Errorf("a change of another namespace compiled %v", over)
	}
	evil.set(3, 9) // one endpoint goes
	e.Snapshot()
	evil.set(3, 10)
	e.Snapshot()
	if compiled := len(over); compiled == 0 || compiled > 3 {
		t.Errorf("a change of one endpoint compiled %v", over)
	}
}

// TestBudgetsInRandomWorlds changes random Services of three namespaces. A Service that does not
// change must not lose endpoints, and in the end everything must be served that fits.
func TestBudgetsInRandomWorlds(t *testing.T) {
	waited := 0
	for seed := range uint64(100) {
		r := rand.New(rand.NewPCG(seed, 3))
		b := Budget{Total: 50 + r.IntN(50), Namespace: pick(r, 0, 20+r.IntN(20))}
		tr, e, _ := budgeted(t, b)
		var tenants []tenant
		for i := range 3 {
			tenants = append(tenants, tenant{tr, fmt.Sprint("ns", i), i})
		}
		type place struct{ tenant, service int }
		wants, has := map[place]int{}, map[place]int{}
		check := func(changed map[place]bool) {
			t.Helper()
			sum, by, ports := 0, map[string]int{}, 0
			now := map[place]int{}
			for _, s := range e.Snapshot().Services {
				var p place
				fmt.Sscanf(s.Key.Namespace+" "+s.Key.Name, "ns%d s%d", &p.tenant, &p.service)
				now[p] = len(s.Selection.Cluster)
				sum += s.Cost()
				by[s.Key.Namespace] += s.Cost()
				ports++
				if now[p] > wants[p] {
					t.Errorf("%v has %d endpoints of %d", p, now[p], wants[p])
				}
			}
			for p, n := range has {
				if want, ok := wants[p]; ok && !changed[p] && (now[p] < n || want > 0 && now[p] == 0) {
					t.Errorf("%v lost endpoints: %d of %d", p, now[p], n)
				}
			}
			has = now
			if sum != e.total.used || sum > b.Total+ports {
				t.Errorf("%d elements cost %d of %d", e.total.used, sum, b.Total)
			}
			for name, a := range e.namespaces {
				if a.used != by[name] || a.used > a.limit+ports {
					t.Errorf("%s: %d elements cost %d of %d", name, a.used, by[name], a.limit)
				}
			}
			waited += len(e.waiting)
			if t.Failed() {
				t.Fatalf("seed %d", seed)
			}
		}
		set := func(p place, n int) {
			wants[p] = n
			tenants[p.tenant].set(p.service, n)
		}
		remove := func(p place) {
			delete(wants, p)
			tenants[p.tenant].delete(p.service)
		}
		for range 100 {
			changed := map[place]bool{}
			for range 1 + r.IntN(3) {
				p := place{r.IntN(3), r.IntN(8)}
				changed[p] = true
				if _, ok := wants[p]; ok && r.IntN(3) == 0 {
					remove(p)
				} else {
					set(p, r.IntN(8))
				}
			}
			check(changed)
		}
		for {
			sum, by := 0, [3]int{}
			for p, n := range wants {
				sum += n + 1
				by[p.tenant] += n + 1
			}
			if sum <= b.Total && (b.Namespace == 0 || slices.Max(by[:]) <= b.Namespace) {
				break
			}
			for {
				p := place{r.IntN(3), r.IntN(8)}
				if _, ok := wants[p]; ok {
					remove(p)
					check(map[place]bool{p: true})
					break
				}
			}
		}
		check(nil)
		if !maps.Equal(has, wants) || len(e.waiting) != 0 {
			t.Fatalf("seed %d: everything fits, but the Services have\n%v of\n%v, and %d ports wait", seed, has, wants, len(e.waiting))
		}
		for p := range maps.Clone(wants) {
			remove(p)
		}
		e.Snapshot()
		if e.total.used != 0 || len(e.namespaces)+len(e.waiting) != 0 {
			t.Fatalf("seed %d: %d elements, %d namespaces, %d waiting ports are left", seed, e.total.used, len(e.namespaces), len(e.waiting))
		}
	}
	if waited < 1000 {
		t.Errorf("only %d ports waited", waited)
	}
}
