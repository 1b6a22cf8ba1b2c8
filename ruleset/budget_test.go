package ruleset

import (
	"bytes"
	"cmp"
	"context"
	"fmt"
	"log/slog"
	"maps"
	"math/rand/v2"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	v1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/go-proxier/proxier/internal/testing/must"
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

// TestPortBoundsEndpoints cuts random Services with endpoints on two nodes.
func TestPortBoundsEndpoints(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 2))
	cuts := 0
	for range 5_000 {
		p := &tracker.ServicePort{Key: key("a", tracker.IPv4), ClusterIP: addrs("172.30.0.1")[0], Port: 80,
			ExternalIPs: addrs(many(1, r.IntN(6))...), ExternalLocal: r.IntN(2) == 0}
		var eps []*tracker.Endpoint
		for _, a := range many(4, r.IntN(40)) {
			ep := endpoint(a+":80", pick(r, "n1", "n2"))
			ep.Ready, ep.Weight = true, 1
			eps = append(eps, ep)
		}
		b := Budget{Port: 1 + r.IntN(40)}
		s := Compile(tracker.PortState{Port: p, Endpoints: eps}, &Node{Info: tracker.NodeInfo{Name: "n1"}})
		out := b.limit(s)
		over := len(s.Selection.Reachable) > b.Port
		if over != (out.LeftOut != nil) || over == (out == s) {
			t.Fatalf("%d of %d endpoints: %+v", len(s.Selection.Reachable), b.Port, out.LeftOut)
		}
		if !over {
			continue
		}
		cuts++
		if len(out.Frontends) != len(s.Frontends) {
			t.Fatalf("%d frontends of %d", len(out.Frontends), len(s.Frontends))
		}
		missing := 0
		for _, target := range poolTargets {
			before, now := s.Pool(target), out.Pool(target)
			if missing = max(missing, len(before)-len(now)); len(before) != 0 && len(now) == 0 || !slices.Equal(now, before[:len(now)]) {
				t.Fatalf("%s: %d endpoints of %d", target, len(now), len(before))
			}
			for _, ep := range now {
				if !slices.Contains(out.Selection.Reachable, ep) {
					t.Fatal("Reachable lacks an endpoint of a pool")
				}
			}
		}
		if n := len(out.Selection.Reachable); n > max(b.Port, 2) || out.LeftOut.Endpoints != missing {
			t.Fatalf("%d reachable endpoints of %d: %+v", n, b.Port, out.LeftOut)
		}
	}
	if cuts < 1000 {
		t.Errorf("only %d Services were cut", cuts)
	}
}

// TestTableHasTheSizeThatIsAskedFor has a hash table with few endpoints and with many.
func TestTableHasTheSizeThatIsAskedFor(t *testing.T) {
	for _, c := range []struct {
		asked          uint16
		endpoints      int
		want, elements int
	}{
		{0, 2, 509, 512},
		{0, 200, MaxBuckets, MaxBuckets + 201},
		{2039, 2, 2039, 2042},
		{2039, 200, 2039, 2240},
		{10007, 2, MaxBuckets, MaxBuckets + 3},
		{65521, 4093, MaxBuckets, 2*MaxBuckets + 1},
		{10007, 4094, 8191, 8191 + 4095},
	} {
		p := &tracker.ServicePort{Key: key("a", tracker.IPv4), ClusterIP: addrs("172.30.0.1")[0], Port: 80, Hash: tracker.HashSource, HashBuckets: c.asked}
		var eps []*tracker.Endpoint
		for _, a := range many(4, c.endpoints) {
			ep := endpoint(a+":80", "n1")
			ep.Ready, ep.Weight = true, 1
			eps = append(eps, ep)
		}
		s := Compile(tracker.PortState{Port: p, Endpoints: eps}, nil)
		if got := s.HashBuckets(TargetCluster); got != c.want || s.Maglev(TargetCluster, 1).Len() != got || s.Cost() != c.elements {
			t.Errorf("%d buckets, %d endpoints: %d buckets and %d elements, want %d and %d", c.asked, c.endpoints, got, s.Cost(), c.want, c.elements)
		}
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
		cost += changedElements(&d.Changes[i])
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
		must.Do(t, c.Sync(t.Context()))
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
	for _, s := range e.Snapshot().Ports {
		if diff(c.Port(s.Key), s) != 0 {
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
	must.Do(t, c.Sync(t.Context()))
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
		must.Do(t, c.Sync(t.Context()))
		served := 0
		for _, s := range e.Snapshot().Ports {
			if s.Key.Name == "evil" && c.Port(s.Key) != nil {
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
	must.Do(t, c.Sync(t.Context()))
	r.deltas, r.costs = nil, nil
	last := 0
	k := e.Snapshot().Ports[0].Key
	r.during = func(int) {
		n := len(c.Port(k).Selection.Cluster)
		if n < last {
			t.Errorf("%d endpoints after %d", n, last)
		}
		last = n
	}
	tr.SetSlice(slice("a", many(1, 1000)...))
	must.Do(t, c.Sync(t.Context()))
	if len(r.deltas) != 10 || slices.Max(r.costs) > 110 {
		t.Errorf("%d deltas of %v elements", len(r.deltas), r.costs)
	}
	if n := len(c.Port(k).Selection.Cluster); n != 1000 {
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
	must.Do(t, c.Sync(t.Context()))
	a := e.Snapshot().Ports[0].Key
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
	must.Do(t, c.Sync(t.Context()))
	if len(r.deltas) != 10 || slices.Max(r.costs) > 110 {
		t.Errorf("%d deltas of %v elements", len(r.deltas), r.costs)
	}
	if first := r.deltas[0]; len(first) != 2 {
		t.Errorf("the first delta has %v", first)
	}
	r.fail = nil
	if s := c.Port(a); s != nil {
		t.Errorf("%d endpoints are left", len(s.Selection.Cluster))
	}
	// It returns while it shrinks.
	tr.SetService(service("a", "172.30.0.2"))
	tr.SetSlice(slice("a", many(1, 1000)...))
	must.Do(t, c.Sync(t.Context()))
	n := 0
	r.during = func(int) {
		if n++; n == 3 {
			tr.SetService(service("a", "172.30.0.2"))
		}
	}
	tr.DeleteService(a.NamespacedName)
	for range 2 {
		must.Do(t, c.Sync(t.Context()))
	}
	if s := c.Port(a); s == nil || len(s.Frontends) != 1 || len(s.Selection.Cluster) != 1000 {
		t.Errorf("the Service that returned is %+v", s)
	}
}

// TestFailedDeltaLeavesTheRestForTheNextSync fails in the middle.
func TestFailedDeltaLeavesTheRestForTheNextSync(t *testing.T) {
	b := Budget{Delta: 100}
	tr, e, _ := budgeted(t, b)
	r := &deltaRecorder{b: b}
	c := e.Attach("b", r)
	must.Do(t, c.Sync(t.Context()))
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
	must.Do(t, c.Sync(t.Context()))
	for _, s := range e.Snapshot().Ports {
		if diff(c.Port(s.Key), s) != 0 {
			t.Errorf("%s is not in effect", s.Key)
		}
	}
}

// TestLargeServicesAreComplete compiles 20,000 endpoints in every kind of Service, and one more.
func TestLargeServicesAreComplete(t *testing.T) {
	const n = 20_000
	for _, c := range []struct {
		what string
		set  func(*tracker.ServicePort)
	}{
		{"plain", func(*tracker.ServicePort) {}},
		{"affinity", func(p *tracker.ServicePort) { p.Affinity = time.Hour }},
		{"policy Local", func(p *tracker.ServicePort) { p.ExternalLocal, p.NodePort = true, 30000 }},
		{"both", func(p *tracker.ServicePort) { p.ExternalLocal, p.NodePort, p.Affinity = true, 30000, time.Hour }},
		{"hash", func(p *tracker.ServicePort) { p.Hash = tracker.HashSource }},
	} {
		for _, weighted := range []bool{false, true} {
			for _, more := range []int{0, 1} {
				p := &tracker.ServicePort{Key: key("a", tracker.IPv4), ClusterIP: addrs("172.30.0.1")[0], Port: 80}
				c.set(p)
				var eps []*tracker.Endpoint
				for i := range n + more {
					ep := endpoint(fmt.Sprintf("10.%d.%d.%d:80", i>>16, i>>8&255, i&255), "n1")
					ep.Ready, ep.Weight = true, 1
					if weighted {
						ep.Weight = uint16(1 + i%100)
					}
					eps = append(eps, ep)
				}
				b := DefaultBudget()
				out := b.limit(Compile(tracker.PortState{Port: p, Endpoints: eps}, &Node{Info: tracker.NodeInfo{Name: "n1"}}))
				left := out.LeftOut
				if (left == nil) != (more == 0) || out.Cost() > b.Namespace {
					t.Errorf("%s, weights %t: %d endpoints: %v, %d elements", c.what, weighted, n+more, left, out.Cost())
				}
				if got := len(out.Selection.Reachable); got != n || more != 0 && left.Endpoints != 1 {
					t.Errorf("%s, weights %t: %d of %d endpoints: %+v", c.what, weighted, got, n+more, left)
				}
				if out.Hash() != p.Hash || out.Weighted(TargetCluster) != weighted {
					t.Errorf("%s: weights %t, hash %v: %v", c.what, out.Weighted(TargetCluster), out.Hash(), left)
				}
			}
		}
	}
}

// TestTraceKnowsSourceRangesLeftOut gives a Service more source ranges than the tracker uses.
func TestTraceKnowsSourceRangesLeftOut(t *testing.T) {
	tr, e, _ := budgeted(t, DefaultBudget())
	for _, c := range []struct {
		what    string
		n, step int
		rule    string
	}{
		{"few", 10, 2, ""},
		{"many", 100_000, 2, ""},
		{"neighbors", 150_000, 1, ""},
		{"too many", 100_001, 2, "not among the first 100000 source ranges of the load-balancer IP of default/a:p/TCP/IPv4 (it has too many source ranges; left out: 1 source ranges)"},
	} {
		var list []string
		for i := range c.n {
			i *= c.step
			list = append(list, fmt.Sprintf("20.%d.%d.%d/32", i>>16, i>>8&255, i&255))
		}
		last := netip.MustParsePrefix(list[len(list)-1]).Addr()
		tr.SetService(service("a", "172.30.0.1", func(s *v1.Service) {
			s.Spec.Type, s.Spec.LoadBalancerSourceRanges = v1.ServiceTypeLoadBalancer, list
			s.Status.LoadBalancer.Ingress = []v1.LoadBalancerIngress{{IP: "203.0.113.1"}}
		}))
		tr.SetSlice(slice("a", "10.0.0.1"))
		v := e.Snapshot().Trace(Packet{From: last, InInterface: "eth0", Protocol: v1.ProtocolTCP, To: netip.MustParseAddrPort("203.0.113.1:80")})
		if (v.Action == ActionForward) != (c.rule == "") || c.rule != "" && v.Rule != last.String()+" is "+c.rule {
			t.Errorf("%s: %v: %s", c.what, v.Action, v.Rule)
		}
	}
}

// TestTotalIsSharedByNamespaces uses up a Budget that does not bound namespaces.
func TestTotalIsSharedByNamespaces(t *testing.T) {
	tr, e, over := budgeted(t, Budget{Total: 100})
	victim, evil, other := tenant{tr, "victim", 1}, tenant{tr, "evil", 2}, tenant{tr, "other", 3}
	for _, step := range []struct {
		what string
		do   func()
		want string
	}{
		{"a victim", func() { victim.set(5, 29) }, "victim/s5:29"},
		{"an attacker with older Services gets what is left", func() {
			for i := range 5 {
				evil.set(i, 24)
			}
		}, "evil/s0:24 evil/s1:24 victim/s5:29"},
		{"the victim grows to half", func() { victim.set(5, 49) }, "evil/s0:24 evil/s1:24 victim/s5:49"},
		{"and no more", func() { victim.set(6, 9) }, "evil/s0:24 evil/s1:24 victim/s5:49"},
		{"a new namespace", func() { other.set(9, 9) }, "evil/s0:24 other/s9:9 victim/s6:9"},
		{"many Services of the attacker", func() {
			for i := range 10 {
				evil.set(10+i, 1)
			}
		}, "evil/s0:24 evil/s10:1 evil/s11:1 evil/s12:1 evil/s13:1 evil/s14:1 evil/s15:1 evil/s16:1 evil/s17:1 evil/s18:1 evil/s19:1 other/s9:9 victim/s6:9"},
		{"the attacker goes", func() {
			for i := range 20 {
				evil.delete(i)
			}
		}, "other/s9:9 victim/s5:49 victim/s6:9"},
	} {
		step.do()
		if got := endpointsOf(e); got != step.want {
			t.Errorf("%s: served %q, want %q", step.what, got, step.want)
		}
	}
	if len(e.admission.refused) != 0 || over["s4"] == 0 || over["s5"] == 0 || over["s9"] != 0 {
		t.Errorf("refused %v, over %v", e.admission.refused, over)
	}
}

// TestPoolsAreBounded has Services with one endpoint and as many pools as that allows.
func TestPoolsAreBounded(t *testing.T) {
	ep := endpoint("10.0.0.1:80", "n1")
	ep.Ready, ep.Weight = true, 1
	for _, local := range []bool{false, true} {
		s := Compile(tracker.PortState{
			Port:      &tracker.ServicePort{Key: key("a", tracker.IPv4), ClusterIP: addrs("172.30.0.1")[0], Port: 80, NodePort: 30000, ExternalLocal: local},
			Endpoints: []*tracker.Endpoint{ep},
		}, &Node{Info: tracker.NodeInfo{Name: "n1"}})
		pools := len(s.Pool(TargetCluster)) + len(s.Pool(TargetLocal))
		for _, total := range []int{100, maxPools, maxPools + 1, DefaultBudget().Total, 50_000_000} {
			b := Budget{Total: total}
			if all := total / b.cost(s) * pools; all > maxPools {
				t.Errorf("policy Local %t, a total of %d: %d pools", local, total, all)
			}
			if b.cost(s) != s.Cost() && total < maxPools {
				t.Errorf("policy Local %t, a total of %d: a Service costs %d, not %d", local, total, b.cost(s), s.Cost())
			}
		}
	}
	b := DefaultBudget()
	b.Namespace = 35
	tr, e, over := budgeted(t, b)
	a := tenant{tr, "a", 1}
	for i := range 6 {
		a.set(i, 1)
	}
	if got, want := endpointsOf(e), "a/s0:1 a/s1:1 a/s2:1"; got != want || over["s3"] != 1 {
		t.Errorf("served %q, want %q; over the budget: %v", got, want, over)
	}
}

// TestRefusedServiceIsExplained reads why a port has no rules.
func TestRefusedServiceIsExplained(t *testing.T) {
	tr, e, _ := budgeted(t, Budget{Namespace: 4})
	a := tenant{tr, "a", 1}
	a.set(0, 2)
	a.set(1, 2)
	s := e.Snapshot()
	want := "172.31.0.2 is no Service's address; the budget leaves out this cluster IP of a/s1:p/TCP/IPv4 " +
		"(its namespace has no room for it beside older Services: it costs 3 elements; left out: all rules)"
	if v := s.Trace(Packet{From: addrs("10.9.9.9")[0], Protocol: v1.ProtocolTCP, To: netip.MustParseAddrPort("172.31.0.2:80")}); v.Rule != want {
		t.Errorf("got  %s\nwant %s", v.Rule, want)
	}
	if len(s.Refused) != 1 || len(s.Refused[0].Frontends) != 1 || s.Refused[0].LeftOut.Endpoints != 2 {
		t.Errorf("refused: %+v", s.Refused)
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
func (o tenant) set(i, n int) { o.setAt(fmt.Sprint("s", i), i, i, n) }

// setAt is like set for a Service with another name and age.
func (o tenant) setAt(name string, i, age, n int) {
	s := service(name, fmt.Sprintf("172.%d.%d.%d", 30+o.net, i/250, i%250+1))
	s.Namespace, s.CreationTimestamp = o.namespace, metav1.Unix(int64(1000+age), 0)
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
	for _, s := range e.Snapshot().Ports {
		out = append(out, fmt.Sprintf("%s/%s:%d", s.Key.Namespace, s.Key.Name, len(s.Selection.Cluster)))
	}
	slices.Sort(out)
	return strings.Join(out, " ")
}

// TestServiceBeyondItsNamespaceIsReportedOnce reads the log and the events.
func TestServiceBeyondItsNamespaceIsReportedOnce(t *testing.T) {
	var logged bytes.Buffer
	var ev events
	tr := must.Get(tracker.New(tracker.Config{Node: tracker.NodeInfo{Name: "n1"}, Events: &ev}))(t)
	e := must.Get(NewEngine(Config{Source: tr, Budget: Budget{Namespace: 10}, Log: slog.New(slog.NewTextHandler(&logged, nil))}))(t)
	tr.MarkSynced(tracker.KindServices, tracker.KindSlices, tracker.KindNodes)
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
		`Service/s0  true ProxyLimitExceeded: port "p" (IPv4): its namespace has no room for it beside older Services: it costs 21 elements; left out: all rules`,
	}
	if got := ev.take(); !slices.Equal(got, want) {
		t.Errorf("events\n got %q\nwant %q", got, want)
	}
	if n := strings.Count(logged.String(), "\n"); n != 1 {
		t.Errorf("%d lines:\n%s", n, &logged)
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
	if n := len(e.admission.refused); n < 480 {
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
	evil.set(3, 0) // its endpoints go
	e.Snapshot()
	evil.set(3, 10)
	e.Snapshot()
	if compiled := len(over); compiled == 0 || compiled > 3 {
		t.Errorf("a change of one Service compiled %v", over)
	}
}

// TestBudgetsInRandomWorlds changes random Services of three namespaces, and compares what they
// get with a model that knows neither their history nor sums.
func TestBudgetsInRandomWorlds(t *testing.T) {
	type port struct{ tenant, service int }
	refused := 0
	for seed := range uint64(60) {
		r := rand.New(rand.NewPCG(seed, 3))
		b := Budget{Total: pick(r, 0, 100+r.IntN(300)), Namespace: pick(r, 0, 50+r.IntN(150))}
		tr, e, _ := budgeted(t, b)
		c := e.Attach("b", &deltaRecorder{b: b})
		var tenants []tenant
		for i := range 3 {
			tenants = append(tenants, tenant{tr, fmt.Sprint("ns", i), i})
		}
		wants, ages := map[port]int{}, map[port]int{} // endpoints, and ages
		// model lowers what each namespace may have, one by one, until all fit.
		model := func() map[port]int {
			ask := [3]int{}
			for p, n := range wants {
				ask[p.tenant] += n + 1
			}
			most := cmp.Or(b.Namespace, 1000)
			sum := func() (n int) {
				for _, all := range ask {
					n += min(all, most)
				}
				return n
			}
			for b.Total != 0 && sum() > b.Total {
				most--
			}
			out := map[port]int{}
			for i := range tenants {
				left := most
				for _, p := range slices.SortedFunc(maps.Keys(wants), func(a, b port) int { return ages[a] - ages[b] }) {
					if n := wants[p]; p.tenant == i && n < left {
						out[p], left = n, left-n-1
					}
				}
			}
			return out
		}
		for range 100 {
			for range 1 + r.IntN(3) {
				p := port{r.IntN(3), r.IntN(20)}
				if _, ok := wants[p]; ok && r.IntN(3) == 0 {
					delete(wants, p)
					tenants[p.tenant].delete(p.service)
					continue
				} else if !ok {
					ages[p] = 20*r.IntN(100) + p.service
				}
				wants[p] = pick(r, r.IntN(4), r.IntN(40))
				tenants[p.tenant].setAt(fmt.Sprint("s", p.service), p.service, ages[p], wants[p])
			}
			must.Do(t, c.Sync(t.Context()))
			got := map[port]int{}
			place := func(s *Port) (p port) {
				fmt.Sscanf(s.Key.Namespace+" "+s.Key.Name, "ns%d s%d", &p.tenant, &p.service)
				return p
			}
			snapshot := e.Snapshot()
			for _, s := range snapshot.Ports {
				got[place(s)] = len(s.Selection.Cluster)
				if acked := c.Port(s.Key); acked == nil || diff(acked, s) != 0 {
					t.Fatalf("seed %d: %v is not what the backend has", seed, s.Key)
				}
				if left := wants[place(s)] - len(s.Selection.Cluster); left != 0 && (s.LeftOut == nil || s.LeftOut.Endpoints != left) || left == 0 && s.LeftOut != nil {
					t.Fatalf("seed %d: %v lacks %d endpoints: %+v", seed, s.Key, left, s.LeftOut)
				}
			}
			if want := model(); !maps.Equal(got, want) {
				t.Fatalf("seed %d: %+v\nwants %v\n  got %v\n want %v", seed, b, wants, got, want)
			}
			if len(snapshot.Ports)+len(snapshot.Refused) != len(wants) {
				t.Fatalf("seed %d: %d served and %d refused of %d", seed, len(snapshot.Ports), len(snapshot.Refused), len(wants))
			}
			refused += len(snapshot.Refused)
		}
		for p := range wants {
			tenants[p.tenant].delete(p.service)
		}
		e.Snapshot()
		if ad := &e.admission; ad.wanted != 0 || len(ad.namespaces)+len(ad.refused) != 0 {
			t.Fatalf("seed %d: %+v is left", seed, ad)
		}
	}
	if refused < 1000 {
		t.Errorf("only %d ports were refused", refused)
	}
}
