package placement_test

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"reflect"
	"runtime"
	"testing"

	v1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/go-proxier/proxier/internal/testing/must"
	"github.com/go-proxier/proxier/internal/testing/worldgen"
	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/ruleset/placement"
	"github.com/go-proxier/proxier/tracker"
)

// cluster is an engine of all nodes, with the rules of each by what Changes yields.
type cluster struct {
	tracker *tracker.Tracker
	engine  *ruleset.Engine
	cursor  *ruleset.Cursor
	p       *placement.Placements
	infos   map[string]tracker.NodeInfo
	rules   map[string]map[tracker.Key]*ruleset.Port
	// yielded counts the changes, and visited their nodes.
	yielded, visited int
	// fail is the error of Apply, which changes the rules nevertheless.
	fail error
}

func newTracker(t testing.TB, node tracker.NodeInfo) (*tracker.Tracker, *ruleset.Engine) {
	t.Helper()
	tr := must.Get(tracker.New(tracker.Config{Node: node}))(t)
	e := must.Get(ruleset.NewEngine(ruleset.Config{Source: tr}))(t)
	tr.MarkSynced(tracker.KindServices, tracker.KindSlices, tracker.KindNodes)
	return tr, e
}

func newCluster(t testing.TB) *cluster {
	c := &cluster{
		p:     placement.New(),
		infos: map[string]tracker.NodeInfo{}, rules: map[string]map[tracker.Key]*ruleset.Port{},
	}
	c.tracker, c.engine = newTracker(t, tracker.NodeInfo{})
	c.cursor = c.engine.Attach("all", c)
	return c
}

func (c *cluster) Apply(_ context.Context, d *ruleset.Delta) error {
	for i := range d.Changes {
		seen := map[string]bool{}
		for ch := range c.p.Changes(d, &d.Changes[i]) {
			c.yielded++
			for node := range ch.Nodes() {
				c.visited++
				if seen[node] {
					return fmt.Errorf("%s is yielded twice for %v", node, ch.Key)
				}
				seen[node] = true
				if ch.New == nil {
					delete(c.rules[node], ch.Key)
				} else {
					c.rules[node][ch.Key] = ch.New
				}
			}
		}
	}
	return c.fail
}

// join adds a node, or one whose zone changed.
func (c *cluster) join(n tracker.NodeInfo) {
	c.p.SetNode(n)
	c.infos[n.Name] = n
	c.rules[n.Name] = map[tracker.Key]*ruleset.Port{}
	s := c.engine.Snapshot()
	for _, svc := range s.Ports {
		c.rules[n.Name][svc.Key] = c.p.Service(s.Node, svc, n.Name)
	}
}

// TestNodesHaveTheRulesOfTheirOwnEngine makes random changes, with nodes that join and leave.
// Each node must have the frontends and pools of an Engine of its own.
func TestNodesHaveTheRulesOfTheirOwnEngine(t *testing.T) {
	families := []tracker.Family{tracker.IPv4, tracker.IPv6}
	addr := func(v4, v6 string) func(tracker.Family, int) netip.Addr {
		return func(f tracker.Family, n int) netip.Addr {
			if f == tracker.IPv6 {
				return netip.MustParseAddr(fmt.Sprintf("%s%x", v6, n))
			}
			return netip.MustParseAddr(fmt.Sprint(v4, n))
		}
	}
	nodes := []tracker.NodeInfo{
		{Name: "a", Zone: "zone-a", Addresses: []netip.Addr{netip.MustParseAddr("192.0.2.1")}},
		{Name: "b", Zone: "zone-b", Addresses: []netip.Addr{netip.MustParseAddr("198.51.100.1")}},
		{Name: "c", Zone: "zone-a"}, {Name: "d", Zone: "zone-c"}, {Name: "e"},
	}
	for seed := range uint64(40) {
		params := worldgen.Params{
			Families: families, ClusterIP: addr("10.96.0.", "fd00::"), ExternalIP: addr("198.18.0.", "fd01::"), LoadBalancerIP: addr("198.19.0.", "fd02::"),
			Protocols: []v1.Protocol{v1.ProtocolTCP, v1.ProtocolUDP}, Affinity: true, Weights: true,
			Sources: []string{"192.0.2.0/24", "198.51.100.0/24", "fd00::/16"},
		}
		for i := range 6 {
			params.Backends = append(params.Backends, worldgen.Backend{
				Node: string("abcx"[i%4]), Ports: []uint16{80},
				Addr: func(f tracker.Family) netip.Addr { return addr("10.0.0.", "fd03::")(f, i+1) },
			})
		}
		g := worldgen.New(seed, params)
		c := newCluster(t)
		trackers, engines := map[string]*tracker.Tracker{}, map[string]*ruleset.Engine{}
		for _, n := range nodes {
			trackers[n.Name], engines[n.Name] = newTracker(t, n)
		}
		for step := range 30 {
			ops := g.Start
			if step != 0 {
				ops = g.Step
			}
			for _, o := range ops() {
				if o.SetNode != nil {
					continue
				}
				o.Apply(c.tracker)
				for _, n := range nodes {
					o.Apply(trackers[n.Name])
				}
			}
			n := nodes[step%len(nodes)]
			if c.rules[n.Name] != nil && step%3 == 0 {
				c.p.DeleteNode(n.Name)
				delete(c.rules, n.Name)
			}
			if step%11 == 10 {
				c.cursor.Resync()
			}
			must.Do(t, c.cursor.Sync(t.Context()))
			if c.rules[n.Name] == nil {
				c.join(n)
			}
			for name, rules := range c.rules {
				want := engines[name].Snapshot()
				if len(rules) != len(want.Ports) {
					t.Fatalf("seed %d step %d: %s has %d Services, want %d", seed, step, name, len(rules), len(want.Ports))
				}
				for _, w := range want.Ports {
					s := rules[w.Key]
					if s == nil || !sameRules(s, w) {
						t.Fatalf("seed %d step %d: %s has\n%+v\nwant\n%+v", seed, step, name, s, w)
					}
				}
			}
		}
	}
}

// TestFailedAttemptLeavesNoNodeOut fails an Apply and takes the change back. Nothing differs from
// what the nodes had before, but each of them may have the version that failed.
func TestFailedAttemptLeavesNoNodeOut(t *testing.T) {
	for _, local := range []bool{false, true} {
		c := newCluster(t)
		const nodes = 5 // the first three have endpoints
		for i := range nodes {
			c.join(tracker.NodeInfo{Name: nodeName(i)})
		}
		c.tracker.SetService(service(0, local))
		for _, step := range []struct {
			variant int
			fail    error
		}{{0, nil}, {1, errors.New("refused")}, {0, nil}} {
			c.tracker.SetSlice(slice(0, 3, step.variant))
			c.fail, c.visited = step.fail, 0
			if err := c.cursor.Sync(t.Context()); !errors.Is(err, step.fail) {
				t.Fatal(err)
			}
		}
		if c.visited != nodes {
			t.Errorf("local %t: after a failed attempt %d nodes are visited, want %d", local, c.visited, nodes)
		}
		c.compareWithCompile(t, fmt.Sprintf("local %t", local))
	}
}

// TestNodeThatMovesGetsTheRulesOfItsZone changes the zone of a node, and then an endpoint of each
// zone.
func TestNodeThatMovesGetsTheRulesOfItsZone(t *testing.T) {
	c := newCluster(t)
	for i, zone := range []string{"z0", "z0", "z1"} {
		c.join(tracker.NodeInfo{Name: nodeName(i), Zone: zone})
	}
	// Endpoint 0 is for zone z0, and endpoint 1 for zone z1.
	set := func(first int) {
		es := slice(0, 2, first)
		for i := range es.Endpoints {
			es.Endpoints[i].Hints = &discovery.EndpointHints{ForZones: []discovery.ForZone{{Name: fmt.Sprint("z", i)}}}
		}
		c.tracker.SetSlice(es)
		must.Do(t, c.cursor.Sync(t.Context()))
		c.compareWithCompile(t, fmt.Sprint("first endpoint ", first))
	}
	c.tracker.SetService(service(0, false))
	set(0)
	moved := tracker.NodeInfo{Name: nodeName(0), Zone: "z1"}
	if !c.p.SetNode(moved) {
		t.Error("SetNode reports no change of the zone")
	}
	if c.p.SetNode(moved) {
		t.Error("SetNode reports a change of a node that is the same")
	}
	c.join(moved)
	c.compareWithCompile(t, "after the move")
	c.visited = 0
	set(1)
	if c.visited != 1 {
		t.Errorf("a change of zone z0 visits %d nodes, want the one that stayed", c.visited)
	}
}

// TestClassesCoverEachNodeOnce compares Classes, for random Services and nodes, with Service for
// each node.
func TestClassesCoverEachNodeOnce(t *testing.T) {
	compared, shared := 0, 0
	for seed := range uint64(200) {
		r := rand.New(rand.NewPCG(seed, 1))
		c := newCluster(t)
		for i := range r.IntN(12) {
			n := tracker.NodeInfo{Name: nodeName(i), Zone: fmt.Sprint("z", r.IntN(3))}
			if r.IntN(2) == 0 {
				n.Addresses = []netip.Addr{netip.AddrFrom4([4]byte{192, 0, 2, byte(i)})}
			}
			c.join(n)
		}
		for i := range 5 {
			s := service(i, r.IntN(2) == 0)
			if r.IntN(2) == 0 {
				restrict(s)
			}
			c.tracker.SetService(s)
			es := slice(i, r.IntN(6), 0)
			by := r.IntN(3)
			for j := range es.Endpoints {
				hint(&es.Endpoints[j], by, r.IntN(3))
			}
			c.tracker.SetSlice(es)
		}
		all := c.engine.Snapshot()
		for _, s := range all.Ports {
			seen := map[string]bool{}
			for class := range c.p.Classes(all.Node, s) {
				if class.Old != nil || class.Key != s.Key {
					t.Fatalf("seed %d: %+v", seed, class.Change)
				}
				before := len(seen)
				for name := range class.Nodes() {
					if seen[name] {
						t.Fatalf("seed %d: %s is yielded twice", seed, name)
					}
					seen[name] = true
					want := c.p.Service(all.Node, s, name)
					if compared++; !sameRules(class.New, want) || (class.New == s) != (want == s) {
						t.Fatalf("seed %d: %s has\n%+v\nwant\n%+v", seed, name, class.New, want)
					}
				}
				shared += max(0, len(seen)-before-1)
				if class.Everywhere() && len(seen) != len(c.infos) {
					t.Fatalf("seed %d: a class of %d nodes is said to be everywhere", seed, len(seen))
				}
			}
			if len(seen) != len(c.infos) {
				t.Fatalf("seed %d: %d nodes are yielded, want %d", seed, len(seen), len(c.infos))
			}
		}
	}
	if shared < compared/3 {
		t.Errorf("%d of %d Services are shared, too few for this test", shared, compared)
	}
}

// restrict gives a Service a load-balancer IP and source ranges.
func restrict(s *v1.Service) {
	s.Spec.Type = v1.ServiceTypeLoadBalancer
	s.Spec.LoadBalancerSourceRanges = []string{"192.0.2.0/29", "203.0.113.0/24"}
	s.Status.LoadBalancer.Ingress = []v1.LoadBalancerIngress{{IP: "198.18.0.1"}}
}

// hint gives an endpoint a hint for zone i (by 1) or node i (by 2).
func hint(e *discovery.Endpoint, by, i int) {
	switch by {
	case 1:
		e.Hints = &discovery.EndpointHints{ForZones: []discovery.ForZone{{Name: fmt.Sprint("z", i)}}}
	case 2:
		e.Hints = &discovery.EndpointHints{ForNodes: []discovery.ForNode{{Name: nodeName(i)}}}
	}
}

// compareWithCompile fails the test if a node has other rules than Compile returns for it.
func (c *cluster) compareWithCompile(t *testing.T, when string) {
	t.Helper()
	for name, rules := range c.rules {
		all := c.engine.Snapshot()
		for _, s := range all.Ports {
			node := *all.Node
			node.Info = c.infos[name]
			want := ruleset.Compile(tracker.PortState{Port: s.Spec, Endpoints: s.Endpoints}, &node)
			if got := rules[s.Key]; got == nil || !sameRules(got, want) {
				t.Errorf("%s: %s has\n%+v\nwant\n%+v", when, name, got, want)
			}
		}
	}
}

// sameRules compares all that forwards packets.
func sameRules(a, b *ruleset.Port) bool {
	if len(a.Frontends) != len(b.Frontends) {
		return false
	}
	for i := range a.Frontends {
		if !reflect.DeepEqual(a.Frontends[i], b.Frontends[i]) {
			return false
		}
	}
	for _, t := range []ruleset.Target{ruleset.TargetCluster, ruleset.TargetLocal} {
		if a.HasPool(t) != b.HasPool(t) || fmt.Sprint(a.Pool(t)) != fmt.Sprint(b.Pool(t)) {
			return false
		}
	}
	return true
}

func service(i int, local bool) *v1.Service {
	s := &v1.Service{
		ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: fmt.Sprint("s", i)},
		Spec: v1.ServiceSpec{
			ClusterIP: netip.AddrFrom4([4]byte{172, 30, byte(i >> 8), byte(i)}).String(),
			Ports:     []v1.ServicePort{{Port: 80}},
		},
	}
	if local {
		p := v1.ServiceInternalTrafficPolicyLocal
		s.Spec.InternalTrafficPolicy = &p
	}
	return s
}

// slice returns endpoints of Service i, each on another node. The first has an address of its
// own for each odd variant.
func slice(i, endpoints, variant int) *discovery.EndpointSlice {
	unnamed, port := "", int32(8080)
	es := &discovery.EndpointSlice{
		ObjectMeta:  metav1.ObjectMeta{Namespace: "ns", Name: fmt.Sprint("s", i), Labels: map[string]string{discovery.LabelServiceName: fmt.Sprint("s", i)}},
		AddressType: discovery.AddressTypeIPv4, Ports: []discovery.EndpointPort{{Name: &unnamed, Port: &port}},
	}
	for j := range endpoints {
		k, node := i*endpoints+j, nodeName(i+j)
		a := netip.AddrFrom4([4]byte{10, byte(k >> 16), byte(k >> 8), byte(k)})
		if j == 0 && variant%2 == 1 {
			a = netip.AddrFrom4([4]byte{11, byte(k >> 16), byte(k >> 8), byte(k)})
		}
		es.Endpoints = append(es.Endpoints, discovery.Endpoint{Addresses: []string{a.String()}, NodeName: &node})
	}
	return es
}

func nodeName(i int) string { return fmt.Sprint("node-", i%1000) }

// TestChangeCostsTheNodesThatDiffer counts the nodes of a change of one endpoint.
func TestChangeCostsTheNodesThatDiffer(t *testing.T) {
	c := newCluster(t)
	for i := range 1000 {
		c.join(tracker.NodeInfo{Name: nodeName(i), Zone: fmt.Sprint("z", i%3)})
	}
	for i := range 2 {
		c.tracker.SetService(service(i, i == 1))
		c.tracker.SetSlice(slice(i, 10, 0))
	}
	must.Do(t, c.cursor.Sync(t.Context()))
	for i, want := range []struct{ yielded, visited int }{{1, 1000}, {1, 1}} {
		c.yielded, c.visited = 0, 0
		c.tracker.SetSlice(slice(i, 10, 1))
		must.Do(t, c.cursor.Sync(t.Context()))
		if c.yielded != want.yielded || c.visited != want.visited {
			t.Errorf("local %t: %d changes for %d nodes, want %+v", i == 1, c.yielded, c.visited, want)
		}
	}
}

// BenchmarkPlacements measures the memory of all nodes compared with a single node's, and one
// changed endpoint: of a Service that every node sees alike, or that differs on one node
// (local=true).
func BenchmarkPlacements(b *testing.B) {
	for _, size := range []struct{ nodes, services int }{{1000, 1000}, {5000, 10000}} {
		for _, local := range []bool{false, true} {
			b.Run(fmt.Sprintf("nodes=%d/services=%d/local=%t", size.nodes, size.services, local), func(b *testing.B) {
				heap := func() uint64 {
					var m runtime.MemStats
					runtime.GC()
					runtime.GC()
					runtime.ReadMemStats(&m)
					return m.HeapAlloc
				}
				empty := heap()
				p := placement.New()
				tr, e := newTracker(b, tracker.NodeInfo{})
				yielded := 0
				cursor := e.Attach("all", ruleset.BackendFunc(func(_ context.Context, d *ruleset.Delta) error {
					for i := range d.Changes {
						for range p.Changes(d, &d.Changes[i]) {
							yielded++
						}
					}
					return nil
				}))
				for i := range size.services {
					tr.SetService(service(i, local))
					tr.SetSlice(slice(i, 10, 0))
				}
				sync := func() {
					must.Do(b, cursor.Sync(b.Context()))
				}
				sync()
				single := heap() - empty
				for i := range size.nodes {
					name := fmt.Sprint("node-", i) // the first 1,000 have endpoints
					p.SetNode(tracker.NodeInfo{Name: name, Zone: fmt.Sprint("z", i%3)})
				}
				sync()
				all := heap() - empty
				variants := []*discovery.EndpointSlice{slice(7, 10, 0), slice(7, 10, 1)}
				yielded = 0
				n := 0
				b.ReportAllocs()
				for b.Loop() {
					n++
					tr.SetSlice(variants[n%2])
					sync()
				}
				if !local && yielded != n {
					b.Fatalf("%d changes yield %d", n, yielded)
				}
				b.ReportMetric(float64(all)/float64(single), "x-single-node")
				b.ReportMetric(float64(all)/1e6, "MB")
				runtime.KeepAlive(e)
				runtime.KeepAlive(p)
			})
		}
	}
}

// BenchmarkAllNodes computes the rules of 1,000 nodes for 200 Services with 10 endpoints each, by
// Service for each node and by Classes.
func BenchmarkAllNodes(b *testing.B) {
	const nodes, services = 1000, 200
	for _, kind := range []string{"local", "zones", "sources"} {
		p := placement.New()
		rules := map[string][]*ruleset.Port{}
		for i := range nodes {
			addr := netip.AddrFrom4([4]byte{192, 0, byte(i >> 8), byte(i)})
			p.SetNode(tracker.NodeInfo{Name: nodeName(i), Zone: fmt.Sprint("z", i%3), Addresses: []netip.Addr{addr}})
			rules[nodeName(i)] = make([]*ruleset.Port, services)
		}
		tr, e := newTracker(b, tracker.NodeInfo{})
		for i := range services {
			s, es := service(i, kind == "local"), slice(i, 10, 0)
			switch kind {
			case "zones":
				for j := range es.Endpoints {
					hint(&es.Endpoints[j], 1, j%3)
				}
			case "sources":
				restrict(s)
			}
			tr.SetService(s)
			tr.SetSlice(es)
		}
		all := e.Snapshot()
		b.Run(kind+"/by=node", func(b *testing.B) {
			b.ReportAllocs()
			for b.Loop() {
				for i, s := range all.Ports {
					for name := range rules {
						rules[name][i] = p.Service(all.Node, s, name)
					}
				}
			}
		})
		b.Run(kind+"/by=class", func(b *testing.B) {
			b.ReportAllocs()
			for b.Loop() {
				for i, s := range all.Ports {
					for c := range p.Classes(all.Node, s) {
						for name := range c.Nodes() {
							rules[name][i] = c.New
						}
					}
				}
			}
		})
	}
}
