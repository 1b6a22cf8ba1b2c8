package ipvs

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	v1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/go-proxier/proxier/internal/inet"
	"github.com/go-proxier/proxier/internal/testing/backendtest"
	"github.com/go-proxier/proxier/internal/testing/testtime"
	"github.com/go-proxier/proxier/internal/testing/worldgen"
	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/tracker"
)

// fails fails the test unless exactly the numbered Services cannot be programmed completely.
func (r *rig) fails(want ...int) {
	r.tb.Helper()
	err := r.cursor.Sync(context.Background())
	var partial *ruleset.PartialError
	if !errors.As(err, &partial) {
		r.tb.Fatalf("sync: %v, want a PartialError", err)
	}
	var names, wanted []string
	for k := range partial.Failed {
		names = append(names, k.Name)
	}
	for _, i := range want {
		wanted = append(wanted, svcName(i).Name)
	}
	slices.Sort(names)
	if !slices.Equal(names, wanted) {
		r.tb.Errorf("failed: %q, want %q: %v", names, wanted, err)
	}
}

// room limits a set, which has the given number of elements, to that number and more.
func (r *rig) room(set setID, elements, more int) {
	r.tb.Helper()
	r.node.limit(r.tb, set.name(tracker.IPv4), elements+more)
}

// plenty ends the limit of a set.
func (r *rig) plenty(set setID) { r.node.limit(r.tb, set.name(tracker.IPv4), 1<<20) }

// balancer makes a Service of type LoadBalancer.
func balancer(ip string, sources ...string) func(*v1.Service) {
	return func(s *v1.Service) {
		s.Spec.Type = v1.ServiceTypeLoadBalancer
		s.Spec.LoadBalancerSourceRanges = sources
		s.Status.LoadBalancer.Ingress = []v1.LoadBalancerIngress{{IP: ip}}
	}
}

// testFullSetsKeepNoEndpoint replaces endpoints while the sets that have elements for endpoints
// are full.
func testFullSetsKeepNoEndpoint(t *testing.T, newNode func(testing.TB) node) {
	r := newRigOn(t, newNode(t), Config{Families: []tracker.Family{tracker.IPv4}})
	r.set(svc(1), 1, 1, 2)
	r.set(svc(2), 2, 3)
	r.sync()
	r.room(setLoopBack, 3, 0)
	r.set(svc(1), 1, 4, 5, 6)
	r.set(svc(3), 3, -1) // its endpoint, on another node, needs no element
	r.fails(1)
	r.has("ipvsadm -Sn", "-a -t 10.96.0.3:80 -r 10.245.0.1:8080 -m -w 1")
	for i := range 6 {
		r.has("ipvsadm -Sn", fmt.Sprintf("-a -t 10.96.0.%d:80 -r 10.244.1.%d:8080 -m -w %d", []int{1, 1, 2, 1, 1, 1}[i], i+1, []int{0, 0, 1, 1, 1, 1}[i]))
	}
	// The old endpoints' elements left room for two of three.
	r.fails(1)
	r.restart()
	r.fails(1)
	r.set(svc(1), 1, 4, 5)
	r.sync()
	r.plenty(setLoopBack)
	r.set(svc(1), 1, 4, 5, 6)
	r.sync()
	if err := r.backend.tend(context.Background(), time.Now().Add(time.Hour)); err != nil {
		t.Error(err)
	}
	r.agree()
}

// testFullSetsTakeNoFrontend changes Services whose frontends need elements of full sets.
func testFullSetsTakeNoFrontend(t *testing.T, newNode func(testing.TB) node) {
	r := newRigOn(t, newNode(t), Config{Families: []tracker.Family{tracker.IPv4}})
	const ip, at = "198.18.0.1", "198.18.0.1:80"
	r.set(svc(1, balancer(ip)), 1, 1)
	r.set(svc(9, balancer("198.18.0.9", "192.0.2.0/24"), externalLocal), 9, 9) // fills the sets
	r.sync()
	r.room(setLoadBalancer, 2, 0)
	r.room(setLoadBalancerLocal, 1, 0)
	r.room(setLoadBalancerFW, 1, 0)
	for _, restart := range []bool{false, true} {
		again := func(c ...int) {
			t.Helper()
			if restart {
				r.restart()
			}
			r.fails(c...)
		}
		// A new frontend is left out, and the Service's others are served.
		r.set(svc(2, balancer("198.18.0.2")), 2, 2)
		again(2)
		r.has("ipvsadm -Sn", "-a -t 10.96.0.2:80 -r 10.244.1.2:8080 -m -w 1")
		r.hasNot("ipvsadm -Sn", "198.18.0.2")
		r.hasNot("ip -o addr show dev kube-ipvs0", "198.18.0.2")
		r.hasNot("ipset save KUBE-IPVS-IPS", "198.18.0.2")
		r.remove(2)
		// A frontend of another policy stays, and its endpoints are followed.
		r.set(svc(1, balancer(ip), externalLocal), 1, 3)
		again(1)
		r.has("ipvsadm -Sn", "-a -t "+at+" -r 10.244.1.3:8080 -m -w 1")
		r.hasNot("ipvsadm -Sn", at+" -r 10.244.1.1:8080 -m -w 1")
		// A frontend that cannot be restricted gets no further endpoint, and loses those that
		// are gone.
		r.set(svc(1, balancer(ip, "203.0.113.0/24")), 1, 3, 4)
		again(1)
		r.has("ipvsadm -Sn", "-a -t "+at+" -r 10.244.1.3:8080 -m -w 1", "-a -t 10.96.0.1:80 -r 10.244.1.4:8080 -m -w 1")
		r.hasNot("ipvsadm -Sn", at+" -r 10.244.1.4")
		r.set(svc(1, balancer(ip, "203.0.113.0/24")), 1, 4)
		again(1)
		r.hasNot("ipvsadm -Sn", at+" -r 10.244.1.3:8080 -m -w 1", at+" -r 10.244.1.4")
		if bound := strings.Join(r.run("ip -o addr show dev kube-ipvs0"), "\n"); !strings.Contains(bound, " "+ip+"/32") {
			t.Errorf("%s is not bound: %s", ip, bound)
		}
		r.set(svc(1, balancer(ip)), 1, 1)
		r.sync()
		r.has("ipvsadm -Sn", "-a -t "+at+" -r 10.244.1.1:8080 -m -w 1")
	}
	for _, id := range []setID{setLoadBalancer, setLoadBalancerLocal, setLoadBalancerFW} {
		r.plenty(id)
	}
	r.set(svc(1, balancer(ip, "203.0.113.0/24"), externalLocal), 1, 4)
	r.set(svc(2, balancer("198.18.0.2")), 2, 2)
	r.sync()
	if err := r.backend.tend(context.Background(), time.Now().Add(time.Hour)); err != nil {
		t.Error(err)
	}
	r.agree()
}

// testRoomGoesToTheOldest starts with Services that come in another order than that of their age
// or name, and with a set that has room for two.
func testRoomGoesToTheOldest(t *testing.T, newNode func(testing.TB) node) {
	r := newRigOn(t, newNode(t), Config{Families: []tracker.Family{tracker.IPv4}})
	r.sync()
	r.run("ipset add KUBE-CLUSTER-IP 192.0.2.99,tcp:9")
	r.room(setClusterIP, 1, 1)
	created := func(seconds int64) func(*v1.Service) {
		return func(s *v1.Service) { s.CreationTimestamp = metav1.Unix(seconds, 0) }
	}
	r.set(svc(1, created(300)), 1, -1)
	r.set(svc(2, created(100)), 2, -1)
	r.set(svc(3, created(200)), 3, -1)
	r.restart()
	r.fails(1, 3)
	r.has("ipvsadm -Sn", "-a -t 10.96.0.2:80 -r 10.245.0.1:8080 -m -w 1")
	// A full delta deletes the element of another program, so one more has room.
	r.restart()
	r.fails(1)
	r.has("ipvsadm -Sn", "-a -t 10.96.0.3:80 -r 10.245.0.1:8080 -m -w 1")
	// An older Service takes nothing from those that are there.
	r.set(svc(0, created(1)), 0, -1)
	r.fails(0, 1)
	r.restart()
	r.fails(0, 1)
	r.hasNot("ipvsadm -Sn", "10.96.0.0:80", "10.96.0.1:80")
}

// TestRandomFullSets changes random Services while random sets are full. No real server may serve
// that is not an endpoint of the Service, no frontend that worked may stop, none may be open to
// more clients than before, and when the sets have room everything must be as a new Backend makes it.
func TestRandomFullSets(t *testing.T) {
	t.Parallel()
	worlds := uint64(60)
	if testtime.Thorough() {
		worlds = 500
	}
	for seed := *backendtest.Seed; seed < *backendtest.Seed+worlds && !t.Failed(); seed++ {
		newFullWorld(t, seed).run()
	}
}

// fullWorld is a random world with sets that are full.
type fullWorld struct {
	*rig
	t      *testing.T
	memory *memory
	seed   uint64
	rng    *rand.Rand
	gen    *worldgen.Generator
	// served holds the real servers of each frontend that worked after the last change, and owners its
	// Service port.
	served map[virtualKey]map[netip.AddrPort]bool
	owners map[virtualKey]tracker.Key
}

func newFullWorld(t *testing.T, seed uint64) *fullWorld {
	w := &fullWorld{t: t, seed: seed, rng: rand.New(rand.NewPCG(seed, 5))}
	node := tracker.NodeInfo{Name: "node", Addresses: []netip.Addr{netip.MustParseAddr("192.0.2.1")}}
	families := []tracker.Family{tracker.IPv4}
	address := func(prefix string) func(tracker.Family, int) netip.Addr {
		return func(_ tracker.Family, n int) netip.Addr { return netip.MustParseAddr(fmt.Sprint(prefix, n)) }
	}
	var servers []worldgen.Backend
	for i := range 8 {
		name := "node"
		if i%3 == 2 {
			name = "other"
		}
		at := netip.MustParseAddr(fmt.Sprint("10.244.1.", 1+i))
		servers = append(servers, worldgen.Backend{Addr: func(tracker.Family) netip.Addr { return at }, Node: name, Ports: []uint16{8080}})
	}
	w.gen = worldgen.New(seed, worldgen.Params{
		Families: families, Node: node, Backends: servers,
		ClusterIP: address("10.96.0."), ExternalIP: address("198.18.0."), LoadBalancerIP: address("198.18.1."),
		Sources:   []string{"203.0.113.0/24", "203.0.113.7/32", "10.244.0.0/16"},
		Protocols: []v1.Protocol{v1.ProtocolTCP, v1.ProtocolUDP, v1.ProtocolSCTP},
	})
	p, err := backendtest.NewPipeline(tracker.Config{
		Node: node, Families: families, OnService: worldgen.OnService, OnEndpoint: worldgen.OnEndpoint,
	}, ruleset.Config{})
	if err != nil {
		t.Fatal(err)
	}
	w.memory = newMemory(node.Addresses...)
	w.rig = &rig{tb: t, node: memoryNode{w.memory}, config: Config{Families: families}, tracker: p.Tracker, engine: p.Engine}
	return w
}

func (w *fullWorld) run() {
	w.restart()
	for _, op := range w.gen.Start() {
		op.Apply(w.tracker)
	}
	w.sync()
	w.check("at the start")
	for step := range 20 {
		// Sets get more and less room.
		for _, name := range slices.Sorted(maps.Keys(w.memory.sets)) {
			switch s := w.memory.sets[name]; {
			case s.kind == bitmapPort:
			case w.rng.IntN(4) == 0:
				s.max = 1 << 22
			case w.rng.IntN(2) == 0:
				s.max = len(s.elements) + w.rng.IntN(3)
			}
		}
		for range 1 + w.rng.IntN(2) {
			for _, op := range w.gen.Step() {
				op.Apply(w.tracker)
			}
		}
		how := []string{"", "", "", " in a full delta", " after a restart", " with time for drains"}[w.rng.IntN(6)]
		switch how {
		case " in a full delta":
			w.cursor.Resync()
		case " after a restart":
			w.restart()
		case " with time for drains":
			w.settle()
		}
		var partial *ruleset.PartialError
		if err := w.cursor.Sync(context.Background()); err != nil && !errors.As(err, &partial) {
			w.t.Errorf("seed %d, step %d: %v", w.seed, step, err)
		}
		w.check(fmt.Sprintf("in step %d%s", step, how))
		if w.t.Failed() {
			return
		}
	}
	for _, s := range w.memory.sets {
		s.max = 1 << 22
	}
	w.sync()
	w.settle()
	w.cursor.Resync()
	w.sync()
	w.settle()
	got := w.memory.dump()
	w.memory = newMemory(netip.MustParseAddr("192.0.2.1"))
	w.node = memoryNode{w.memory}
	w.restart()
	w.sync()
	if want := w.memory.dump(); got != want {
		w.t.Errorf("seed %d: with room again, the state is not that of a new node: %s", w.seed, backendtest.FirstDifference(got, want))
	}
}

// settle lets all drains end.
func (w *fullWorld) settle() {
	var partial *ruleset.PartialError
	if err := w.backend.tend(context.Background(), time.Now().Add(time.Hour)); err != nil && !errors.As(err, &partial) {
		w.t.Errorf("seed %d: %v", w.seed, err)
	}
}

// check compares the kernel with the Services, and with what it had before.
func (w *fullWorld) check(when string) {
	fail := func(format string, args ...any) {
		w.t.Helper()
		w.t.Errorf("seed %d, %s: %s", w.seed, when, fmt.Sprintf(format, args...))
	}
	served, owners := map[virtualKey]map[netip.AddrPort]bool{}, map[virtualKey]tracker.Key{}
	for _, s := range w.engine.Snapshot().Ports {
		endpoints := map[netip.AddrPort]bool{}
		for _, ep := range s.Endpoints {
			endpoints[ep.Addr] = true
		}
		for i := range s.Frontends {
			f := &s.Frontends[i]
			at := f.Addr
			if f.Kind == ruleset.KindNodePort {
				at = netip.MustParseAddr("192.0.2.1")
			}
			k := virtualKey{family: s.Key.Family, proto: inet.Protocol(s.Key.Protocol), at: netip.AddrPortFrom(at, f.Port)}
			had := w.served[k]
			mine := w.owners[k] == s.Key
			v := w.memory.servers[k]
			if v == nil {
				// A frontend without endpoints is refused before IPVS.
				if mine && f.Target != ruleset.TargetReject {
					fail("%s of %s is gone", k, s.Key)
				}
				continue
			}
			restricted := len(f.Sources) == 0 || w.holds(setLoadBalancerFW, k)
			now := map[netip.AddrPort]bool{}
			for addr, r := range v.reals {
				if r.weight == 0 {
					continue
				}
				now[addr] = true
				if !endpoints[addr] {
					fail("%s of %s has %s, which is gone", k, s.Key, addr)
				}
				if !restricted && !had[addr] {
					fail("%s of %s is not restricted and got %s", k, s.Key, addr)
				}
			}
			for _, ep := range s.Pool(f.Target) {
				if !now[ep.Addr] && restricted {
					fail("%s of %s lacks %s", k, s.Key, ep.Addr)
				}
			}
			if len(f.Sources) != 0 && restricted {
				w.checkSources(fail, k, f.Sources)
			}
			if f.Kind != ruleset.KindNodePort && !w.memory.devices[deviceName].addrs[at] {
				fail("%s of %s: the address is not bound", k, s.Key)
			}
			served[k], owners[k] = now, s.Key
		}
	}
	w.served, w.owners = served, owners
}

// holds reports whether the set has the frontend's element.
func (w *fullWorld) holds(set setID, k virtualKey) bool {
	s := w.memory.sets[set.name(k.family)]
	_, ok := s.elements[s.key(entry{family: k.family, addr: k.at.Addr(), proto: k.proto, port: k.at.Port()})]
	return ok
}

// checkSources checks that no source range is allowed that the Service does not have.
func (w *fullWorld) checkSources(fail func(string, ...any), k virtualKey, want []netip.Prefix) {
	for _, set := range []setID{setLoadBalancerSourceIP, setLoadBalancerSourceCIDR} {
		for e := range w.memory.sets[set.name(k.family)].elements {
			if e.addr == k.at.Addr() && e.port == k.at.Port() && e.proto == k.proto && !slices.Contains(want, e.other) {
				fail("%s admits %s", k, e.other)
			}
		}
	}
}
