package ipvs

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"net/netip"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	v1 "k8s.io/api/core/v1"

	"github.com/go-proxier/proxier/internal/inet"
	"github.com/go-proxier/proxier/internal/testing/backendtest"
	"github.com/go-proxier/proxier/internal/testing/must"
	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/ruleset/dataplane"
	"github.com/go-proxier/proxier/tracker"
)

// followTests are the tests that need a kernel and no packets. They run with Linux's, in
// TestKernelFollowsServices, and with one in memory.
func followTests() map[string]func(*testing.T, func(testing.TB) node) {
	return map[string]func(*testing.T, func(testing.TB) node){
		"random changes give the model's state": testRandomChanges,
		"changes take few requests":             testChangesTakeFewRequests,
		"a restart keeps foreign objects":       testRestartKeepsForeignObjects,
		"marks of other programs are kept":      testMarksOfOthersAreKept,
		"drift is detected and repaired":        testDriftIsRepaired,
		"missing objects cause a full delta":    testMissingObjectsCauseAFullDelta,
		"weights select the scheduler":          testWeightsSelectTheScheduler,
		"Services select the scheduler":         testServicesSelectTheScheduler,
		"Services select the forwarding":        testServicesSelectTheForwarding,
		"NodePorts follow the node's addresses": testNodePortsFollowTheNodesAddresses,
		"refused Services fail alone":           testRefusedServicesFailAlone,
		"interrupted deltas are completed":      testInterruptedDeltasAreCompleted,
		"full sets keep no endpoint":            testFullSetsKeepNoEndpoint,
		"full sets take no frontend":            testFullSetsTakeNoFrontend,
		"room goes to the oldest":               testRoomGoesToTheOldest,
	}
}

// TestMemoryFollowsServices runs followTests with a kernel in memory.
func TestMemoryFollowsServices(t *testing.T) {
	t.Parallel()
	for name, test := range followTests() {
		t.Run(name, func(t *testing.T) {
			test(t, func(testing.TB) node {
				return memoryNode{newMemory(netip.MustParseAddr("192.0.2.1"), netip.MustParseAddr("2001:db8:1::1"))}
			})
		})
	}
}

// testRandomChanges compares the kernel with a model after each of many changes.
func testRandomChanges(t *testing.T, newNode func(testing.TB) node) {
	r := newRigOn(t, newNode(t), Config{})
	rng := rand.New(rand.NewPCG(*backendtest.Seed, 1))
	protocols := []v1.Protocol{v1.ProtocolTCP, v1.ProtocolUDP, v1.ProtocolSCTP}
	taken := map[string]bool{} // cluster IPs that the node has, too
	for step := range 40 {
		for range 1 + rng.IntN(3) {
			i := rng.IntN(6)
			if rng.IntN(4) == 0 {
				r.remove(i)
				continue
			}
			edits := []func(*v1.Service){over(protocols[rng.IntN(3)])}
			if rng.IntN(2) == 0 {
				edits = append(edits, nodePort(int32(30000+i)))
			}
			switch rng.IntN(4) {
			case 0:
				edits = append(edits, externalIPs("198.18.0.1", "2001:db8:e::1"))
			case 1:
				edits = append(edits, externalIPs(fmt.Sprint("198.18.0.", i), "192.0.2.1"))
			}
			if rng.IntN(3) == 0 {
				edits = append(edits, externalLocal)
			}
			var eps []int
			for n := range 5 {
				if rng.IntN(2) == 0 {
					eps = append(eps, (n+1)*(1-2*(n%2)))
				}
			}
			r.set(svc(i, edits...), i, eps...)
		}
		switch rng.IntN(12) {
		case 0:
			r.cursor.Resync()
		case 1:
			r.restart()
		case 2, 3:
			a, do := fmt.Sprintf("10.96.0.%d/32", 1+rng.IntN(5)), "add"
			if taken[a] = !taken[a]; !taken[a] {
				do = "del"
			}
			r.run("ip addr " + do + " " + a + " dev eth0")
		}
		r.sync()
		must.Do(t, r.backend.tend(context.Background(), time.Now().Add(time.Hour)))
		r.agree()
		if step%10 == 9 {
			if err := r.backend.Check(context.Background()); err != nil {
				t.Error(err)
			}
		}
		if t.Failed() {
			t.Fatalf("in step %d", step)
		}
	}
	// Without Services, nothing may be left.
	for i := range 6 {
		r.remove(i)
	}
	r.sync()
	if got := r.run("ipvsadm -Sn"); len(got) != 0 {
		t.Errorf("virtual servers are left: %q", got)
	}
	r.hasNot("ipset save", "add ")
}

// testChangesTakeFewRequests counts the netlink requests of changes.
func testChangesTakeFewRequests(t *testing.T, newNode func(testing.TB) node) {
	for _, n := range []int{10, 300} {
		r := newRigOn(t, newNode(t), Config{})
		for i := range n {
			r.set(svc(i), i, -1, -2, -3)
		}
		r.sync()
		cost := func(what string, most int, change func()) {
			t.Helper()
			change()
			before := r.calls()
			r.sync()
			if got := r.calls() - before; got > most {
				t.Errorf("%d services: %s takes %d requests, want at most %d", n, what, got, most)
			}
		}
		cost("a new endpoint on another node", 1, func() { r.set(svc(1), 1, -1, -2, -3, -4) })
		cost("a removed endpoint", 1, func() { r.set(svc(1), 1, -1, -2, -3) })
		cost("a replaced endpoint", 2, func() { r.set(svc(2), 2, -1, -2, -9) })
		cost("a new endpoint on this node", 2, func() { r.set(svc(3), 3, -1, -2, -3, 5) })
		cost("no change", 0, func() { r.set(svc(3), 3, -1, -2, -3, 5) })
		cost("a new Service", 20, func() { r.set(svc(n), n, -1, -2, -3) })
		cost("a deleted Service", 11, func() { r.remove(n) })
	}
}

// testRestartKeepsForeignObjects restarts the backend after another process left changes half
// done. It must complete them, drain removed endpoints, and keep foreign virtual servers.
func testRestartKeepsForeignObjects(t *testing.T, newNode func(testing.TB) node) {
	r := newRigOn(t, newNode(t), Config{ExcludeCIDRs: []netip.Prefix{netip.MustParsePrefix("10.96.7.0/24")}})
	r.set(svc(1), 1, -1, -2)
	r.set(svc(2, nodePort(30002)), 2, -1)
	r.set(svc(3, over(v1.ProtocolUDP)), 3, -1, -2)
	r.set(svc(4, nodePort(30004), externalLocal), 4, 1, -1)
	r.sync()
	marks := func() (out []string) {
		for _, l := range r.run("ipset save KUBE-SHORT-CIRCUIT") {
			if strings.HasPrefix(l, "add") {
				out = append(out, l)
			}
		}
		return out
	}
	marked := marks()
	if len(marked) != 1 {
		t.Errorf("marks: %q", marked)
	}
	// Two foreign virtual servers have no element in a set. A third one has, but its address is
	// excluded.
	r.run("ipvsadm -A -t 203.0.113.9:99 -s lc")
	r.run("ipvsadm -a -t 203.0.113.9:99 -r 203.0.113.10:99 -m")
	r.run("ipset add KUBE-CLUSTER-IP 10.96.7.1,tcp:80")
	r.run("ipvsadm -A -t 10.96.7.1:80 -s rr")
	r.run("ipvsadm -A -f 77 -s rr")
	// The old process left a draining server, and one that it had not removed yet.
	r.run("ipvsadm -e -t 10.96.0.1:80 -r 10.245.0.2:8080 -m -w 0")
	r.run("ipvsadm -a -t 10.96.0.1:80 -r 10.245.0.7:8080 -m")
	before := r.run("iptables-save -t nat")
	r.remove(2)
	r.set(svc(1), 1, -1)
	r.restart()
	r.sync()
	if after := r.run("iptables-save -t nat"); !slices.Equal(withoutComments(before), withoutComments(after)) {
		t.Errorf("the rules changed:\n%s", strings.Join(after, "\n"))
	}
	if got := marks(); !slices.Equal(got, marked) {
		t.Errorf("marks %q, before %q", got, marked)
	}
	r.has("ipvsadm -Sn", "-A -t 203.0.113.9:99 -s lc", "-a -t 203.0.113.9:99 -r 203.0.113.10:99 -m -w 1", "-A -t 10.96.7.1:80 -s rr", "-A -f 77 -s rr",
		"-a -t 10.96.0.1:80 -r 10.245.0.1:8080 -m -w 1", "-a -t 10.96.0.1:80 -r 10.245.0.2:8080 -m -w 0", "-a -t 10.96.0.1:80 -r 10.245.0.7:8080 -m -w 0")
	r.hasNot("ipvsadm -Sn", "10.96.0.2:80", ":30002")
	// These real servers have no connections, so they have drained.
	must.Do(t, r.backend.tend(context.Background(), time.Now()))
	r.hasNot("ipvsadm -Sn", "10.245.0.2:8080 -m -w 0", "10.245.0.7")
	if err := r.backend.Check(context.Background()); err != nil {
		t.Error(err)
	}
}

// testMarksOfOthersAreKept has virtual servers of another program at marks of the Backend's range,
// and one that a Backend left without an element.
func testMarksOfOthersAreKept(t *testing.T, newNode func(testing.TB) node) {
	r := newRigOn(t, newNode(t), Config{Families: []tracker.Family{tracker.IPv4}})
	theirs := []string{"-A -f 12289 -s rr", "-A -f 12300 -s lc"}
	r.run("ipvsadm " + theirs[0])
	r.run("ipvsadm " + theirs[1])
	r.set(svc(1, nodePort(30001), externalLocal), 1, -1)
	r.sync()
	r.has("nft list tables", "table inet proxier-ipvs-marks")
	r.has("ipvsadm -Sn", append(theirs, "-A -f 12290 -s rr", "-a -f 12290 -r 10.245.0.1:8080 -m -w 1")...)
	if err := r.backend.Check(context.Background()); err != nil {
		t.Error(err)
	}
	r.run("ipset del KUBE-SHORT-CIRCUIT 192.0.2.1,tcp:30001")
	r.remove(1)
	r.restart()
	r.sync()
	r.has("ipvsadm -Sn", theirs...)
	r.hasNot("ipvsadm -Sn", "-f 12290")
	must.Do(t, r.backend.cleanup(context.Background()))
	r.same("after Cleanup", r.run("ipvsadm -Sn"), theirs)
	r.hasNot("nft list tables", "proxier-ipvs-marks")
}

func withoutComments(lines []string) (out []string) {
	for _, l := range lines {
		if !strings.HasPrefix(l, "#") && !strings.HasPrefix(l, ":") {
			out = append(out, l)
		}
	}
	return out
}

// testDriftIsRepaired alters one object of each kind. Check must report it, and the next full
// delta must repair it.
func testDriftIsRepaired(t *testing.T, newNode func(testing.TB) node) {
	r := newRigOn(t, newNode(t), Config{Families: []tracker.Family{tracker.IPv4}})
	r.set(svc(1, nodePort(30001)), 1, 1, -1)
	r.sync()
	rules := func() []string { return withoutComments(r.run("iptables-save")) }
	before := rules()
	ctx := context.Background()
	must.Do(t, r.backend.Check(ctx))
	for _, c := range []string{
		"ipvsadm -D -t 10.96.0.1:80",
		"ipvsadm -C",
		"ipvsadm -d -t 10.96.0.1:80 -r 10.245.0.1:8080",
		"ipvsadm -e -t 10.96.0.1:80 -r 10.245.0.1:8080 -m -w 5",
		"ipvsadm -a -t 10.96.0.1:80 -r 10.245.0.66:8080 -m",
		"ipvsadm -E -t 10.96.0.1:80 -s lc",
		"ipset del KUBE-CLUSTER-IP 10.96.0.1,tcp:80",
		"ipset add KUBE-LOOP-BACK 10.9.9.9,tcp:80,10.9.9.9",
		"ipset flush",
		"ip addr del 10.96.0.1/32 dev kube-ipvs0",
		"ip addr add 10.77.0.1/32 dev kube-ipvs0",
		"ip link del kube-ipvs0",
		"iptables -t nat -F KUBE-IPVS-POSTROUTING",
		"iptables -t mangle -D INPUT 1",
		"iptables -t filter -A KUBE-IPVS-FILTER -j ACCEPT",
		"iptables -t nat -F",
		"nft delete table inet proxier-ipvs-marks",
	} {
		r.run(c)
		err := r.backend.Check(ctx)
		needFull(t, err, c)
		var drift *dataplane.DriftError
		if !errors.As(err, &drift) || drift.What == "" {
			t.Errorf("%s: %v", c, err)
		}
		needFull(t, r.backend.Check(ctx), c+", second Check")
		r.cursor.Resync()
		r.sync()
		must.Do(t, r.backend.tend(ctx, time.Now()))
		r.agree()
		if err := r.backend.Check(ctx); err != nil {
			t.Errorf("%s: not repaired: %v", c, err)
		}
		r.same("rules after "+c, rules(), before)
	}
}

// testMissingObjectsCauseAFullDelta deletes objects that the next delta changes.
func testMissingObjectsCauseAFullDelta(t *testing.T, newNode func(testing.TB) node) {
	r := newRigOn(t, newNode(t), Config{})
	for i, c := range []string{"ipvsadm -C", "ipvsadm -d -t 10.96.0.1:80 -r 10.245.0.1:8080", "ip link del kube-ipvs0"} {
		r.set(svc(1), 1, -1, -2)
		r.set(svc(2), 2, -1)
		r.cursor.Resync()
		r.sync()
		r.run(c)
		// The Cursor follows the failed delta with a full one.
		r.set(svc(1), 1, -3)
		r.set(svc(2), 2, -2)
		r.set(svc(10+i), 10+i, -1)
		r.sync()
		must.Do(t, r.backend.tend(context.Background(), time.Now()))
		r.agree()
	}
}

func testWeightsSelectTheScheduler(t *testing.T, newNode func(testing.TB) node) {
	r := newRigOn(t, newNode(t), Config{})
	s := slice(1, v1.ProtocolTCP, -1, -2, -3)
	for i, w := range []string{"weight-3", "weight-1", "weight-0"} {
		s.Endpoints[i].Hostname = &w
	}
	r.tracker.SetService(svc(1))
	r.tracker.SetSlice(s)
	r.sync()
	r.has("ipvsadm -Sn", "-A -t 10.96.0.1:80 -s wrr", "-a -t 10.96.0.1:80 -r 10.245.0.1:8080 -m -w 3",
		"-a -t 10.96.0.1:80 -r 10.245.0.2:8080 -m -w 1")
	// An endpoint of weight 0 is in no pool.
	r.hasNot("ipvsadm -Sn", "10.245.0.3")
	r.set(svc(1), 1, -1, -2, -3)
	r.sync()
	r.has("ipvsadm -Sn", "-A -t 10.96.0.1:80 -s rr", "-a -t 10.96.0.1:80 -r 10.245.0.1:8080 -m -w 1", "-a -t 10.96.0.1:80 -r 10.245.0.3:8080 -m -w 1")
}

func testServicesSelectTheScheduler(t *testing.T, newNode func(testing.TB) node) {
	r := newRigOn(t, newNode(t), Config{Families: []tracker.Family{tracker.IPv4}, Properties: propertiesOf, Schedulers: append(Schedulers(), "zz")})
	for _, c := range []struct{ properties, want string }{
		{"", "rr"}, {"lc", "lc"}, {"mh port", "mh -b mh-fallback,mh-port"}, {"mh", "mh -b mh-fallback"}, {"sh port", "sh -b sh-fallback,sh-port"},
		{"wlc", "wlc"}, {"zz", "rr"}, {"unlisted", "rr"}, {"ovf", "ovf"}, {"", "rr"},
	} {
		r.set(svc(1, with(c.properties), nodePort(30001)), 1, -1)
		r.sync()
		r.has("ipvsadm -Sn", "-A -t 10.96.0.1:80 -s "+c.want, "-A -t 192.0.2.1:30001 -s "+c.want)
		var s *ruleset.Port
		for _, p := range r.engine.Snapshot().Ports {
			s = p
		}
		limited := r.backend.config.ignored(s) != nil
		if want := c.properties == "zz" || c.properties == "unlisted"; limited != want {
			t.Errorf("%q: limited %t", c.properties, limited)
		}
	}
	// A new process finds the scheduler.
	r.set(svc(1, with("lc")), 1, -1)
	r.sync()
	r.restart()
	before := r.calls()
	r.sync()
	r.has("ipvsadm -Sn", "-A -t 10.96.0.1:80 -s lc")
	t.Logf("a restart takes %d requests", r.calls()-before)
}

func testServicesSelectTheForwarding(t *testing.T, newNode func(testing.TB) node) {
	r := newRigOn(t, newNode(t), Config{Families: []tracker.Family{tracker.IPv4}, Properties: propertiesOf, Schedulers: Schedulers()})
	for _, c := range []struct{ how, want string }{{"", "-m -w 1"}, {"tunnel", "-i -w 1 --tun-type ipip"}, {"direct", "-g -w 1"}, {"", "-m -w 1"}, {"direct", "-g -w 1"}} {
		r.set(svc(1, with("rr "+c.how), nodePort(30001), externalIPs("198.18.0.1")), 1, -1)
		r.sync()
		r.has("ipvsadm -Sn", "-a -t 198.18.0.1:80 -r 10.245.0.1:8080 "+c.want,
			"-a -t 10.96.0.1:80 -r 10.245.0.1:8080 -m -w 1", "-a -t 192.0.2.1:30001 -r 10.245.0.1:8080 -m -w 1")
		internal := []string{"-a -f 12289 -r 10.245.0.1:8080 -m -w 1"}
		if got := missing(internal, r.run("ipvsadm -Sn")); (len(got) == 0) != (c.how != "") {
			t.Errorf("%q: internal traffic lacks %q", c.how, got)
		}
		if err := r.backend.Check(context.Background()); err != nil {
			t.Error(err)
		}
	}
	// A new process finds everything in place, unless another program changed it.
	for _, foreign := range []bool{false, true} {
		if foreign {
			r.run("ipvsadm -e -t 198.18.0.1:80 -r 10.245.0.1:8080 -m -w 1")
			needFull(t, r.backend.Check(context.Background()), "another forwarding")
		}
		r.restart()
		r.sync()
		r.has("ipvsadm -Sn", "-a -t 198.18.0.1:80 -r 10.245.0.1:8080 -g -w 1")
	}
}

// testNodePortsFollowTheNodesAddresses adds and deletes addresses of the node.
func testNodePortsFollowTheNodesAddresses(t *testing.T, newNode func(testing.TB) node) {
	r := newRigOn(t, newNode(t), Config{})
	r.set(svc(1, nodePort(30001), externalIPs("198.18.0.7")), 1, -1)
	r.set(svc(2), 2, -1)
	r.sync()
	r.agree()
	tend := func() {
		t.Helper()
		must.Do(t, r.backend.tend(context.Background(), time.Now()))
	}
	before := r.calls()
	tend()
	if got := r.calls() - before; got != 0 {
		t.Errorf("Retire made %d requests without a change, want 0", got)
	}
	r.run("ip addr add 192.0.2.99/24 dev eth0")
	tend()
	r.has("ipvsadm -Sn", "-A -t 192.0.2.99:30001 -s rr", "-a -t 192.0.2.99:30001 -r 10.245.0.1:8080 -m -w 1")
	r.agree()
	// The next delta follows addresses, too.
	r.run("ip addr del 192.0.2.99/24 dev eth0")
	r.set(svc(2), 2, -1, -2)
	r.sync()
	r.hasNot("ipvsadm -Sn", "192.0.2.99")
	// An external IP becomes an address of the node. It is then unbound, and its other ports
	// belong to the node.
	r.run("ip addr add 198.18.0.7/32 dev eth0")
	tend()
	r.has("ipvsadm -Sn", "-A -t 198.18.0.7:80 -s rr", "-A -t 198.18.0.7:30001 -s rr")
	r.hasNot("ip -o addr show dev kube-ipvs0", "198.18.0.7")
	r.hasNot("ipset save", "IPS 198.18.0.7")
	r.run("ip addr del 198.18.0.7/32 dev eth0")
	tend()
	r.agree()
	// So is a cluster IP, also if Check sees it first, and bound again later.
	r.run("ip addr add 10.96.0.2/32 dev eth0")
	tend()
	r.agree()
	r.hasNot("ipset save", "IPS 10.96.0.2")
	r.run("ip addr del 10.96.0.2/32 dev eth0")
	if err := r.backend.Check(context.Background()); err != nil {
		t.Error(err)
	}
	tend()
	r.agree()
	r.has("ipset save", "add KUBE-IPVS-IPS 10.96.0.2")
	if err := r.backend.Check(context.Background()); err != nil {
		t.Error(err)
	}
}

// testRefusedServicesFailAlone makes the kernel refuse single Services.
func testRefusedServicesFailAlone(t *testing.T, newNode func(testing.TB) node) {
	r := newRigOn(t, newNode(t), Config{Families: []tracker.Family{tracker.IPv4}})
	r.set(svc(1), 1, -1)
	r.sync()
	// A set is full.
	r.run("ipset create full hash:ip,port maxelem 1")
	r.run("ipset add full 10.96.0.1,tcp:80")
	r.run("ipset swap full KUBE-CLUSTER-IP")
	r.set(svc(2), 2, -1)
	r.tracker.SetSlice(slice(1, v1.ProtocolTCP, -1, -2))
	err := r.cursor.Sync(context.Background())
	var partial *ruleset.PartialError
	if !errors.As(err, &partial) || len(partial.Failed) != 1 {
		t.Fatalf("%v", err)
	}
	r.has("ipvsadm -Sn", "-a -t 10.96.0.1:80 -r 10.245.0.2:8080 -m -w 1")
	// A full delta fails for the same Service alone.
	r.cursor.Resync()
	if err := r.cursor.Sync(context.Background()); !errors.As(err, &partial) || len(partial.Failed) != 1 {
		t.Fatalf("%v", err)
	}
	r.has("ipvsadm -Sn", "-a -t 10.96.0.1:80 -r 10.245.0.1:8080 -m -w 1")
	// The set has room again.
	r.run("ipset swap full KUBE-CLUSTER-IP")
	r.sync()
	r.agree()
	// The context is canceled, or the backend closed.
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	if err := r.backend.Apply(ctx, &ruleset.Delta{}); !errors.Is(err, context.Canceled) {
		t.Errorf("canceled: %v", err)
	}
	r.backend.Close()
	if err := r.backend.Check(context.Background()); !errors.Is(err, os.ErrClosed) {
		t.Errorf("closed: %v", err)
	}
	// A device of another type has the name.
	r.run("ip link del " + deviceName)
	r.run("ip link add " + deviceName + " type bridge")
	r.restart()
	if err := r.cursor.Sync(context.Background()); err == nil || !strings.Contains(err.Error(), "bridge") {
		t.Errorf("device: %v", err)
	}
}

// testInterruptedDeltasAreCompleted ends deltas between any two of their steps. The next delta
// must complete all changes, and bind exactly the addresses of the Services.
func testInterruptedDeltasAreCompleted(t *testing.T, newNode func(testing.TB) node) {
	r := newRigOn(t, newNode(t), Config{Families: []tracker.Family{tracker.IPv4}})
	reader := must.Get(r.node.open(t, r.config))(t)
	defer reader.Close()
	addrs := func(n int) []string {
		return []string{fmt.Sprint("198.18.0.", 1+n%2), fmt.Sprint("198.18.1.", 1+n%3), "198.18.2.1"}
	}
	for _, full := range []bool{false, true} {
		every := 1
		if full {
			every = 3 // a full delta takes longer
		}
		for n := 0; ; n += every {
			// Addresses are added, removed, and moved from one Service to another.
			for i := range 3 {
				if (n+i)%3 == 0 {
					r.remove(i)
				} else {
					r.set(svc(i, externalIPs(addrs(n)[i]), over([]v1.Protocol{v1.ProtocolTCP, v1.ProtocolUDP}[(n/3)%2])), i, -1-n%5, 1+n%5)
				}
			}
			if full {
				r.cursor.Resync()
			}
			calls := 0
			err := r.cursor.Sync(pausing{context.Background(), func() error {
				if calls++; calls > n {
					return context.Canceled
				}
				return nil
			}})
			if err != nil && !errors.Is(err, context.Canceled) {
				t.Fatalf("interrupted in step %d: %v", n, err)
			}
			r.sync()
			must.Do(t, r.backend.tend(context.Background(), time.Now().Add(time.Hour)))
			what := fmt.Sprintf("interrupted in step %d, full %v", n, full)
			must.Do(t, reader.kernel.ensureDevice())
			found, rerr := reader.readFamily(tracker.IPv4, time.Now())
			if rerr != nil {
				t.Fatal(rerr)
			}
			var virtuals []string
			bound := map[netip.Addr]bool{}
			for _, s := range r.engine.Snapshot().Ports {
				if s.Key.Family != tracker.IPv4 {
					continue
				}
				for _, f := range s.Frontends {
					bound[f.Addr] = true
					k := virtualKey{family: tracker.IPv4, proto: inet.Protocol(s.Key.Protocol), at: netip.AddrPortFrom(f.Addr, f.Port)}
					virtuals = append(virtuals, k.String())
					v := found.virtuals[k]
					if v == nil {
						t.Errorf("%s: no virtual server %s", what, k)
						continue
					}
					for _, ep := range s.Pool(f.Target) {
						if v.reals[ep.Addr] != 1 {
							t.Errorf("%s: %s has %v, want %s", what, k, v.reals, ep.Addr)
						}
					}
				}
			}
			have, want := slices.SortedFunc(found.bound.All(), netip.Addr.Compare), slices.SortedFunc(maps.Keys(bound), netip.Addr.Compare)
			if !slices.Equal(have, want) {
				t.Errorf("%s: bound is %v, want %v", what, have, want)
			}
			for k := range found.virtuals {
				if !slices.Contains(virtuals, k.String()) {
					t.Errorf("%s: %s is left", what, k)
				}
			}
			if err == nil {
				// The delta had no further step.
				if n < 12 {
					t.Errorf("full %v: only %d steps", full, n)
				}
				t.Logf("full %v: %d steps", full, n)
				break
			}
		}
		if err := r.backend.Check(context.Background()); err != nil {
			t.Error(err)
		}
		r.agree()
	}
}

// pausing is a context whose Err calls do. A Backend calls Err between its steps.
type pausing struct {
	context.Context
	do func() error
}

func (p pausing) Err() error { return errors.Join(p.Context.Err(), p.do()) }
