//go:build linux

package ipvs

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"maps"
	"math/rand/v2"
	"net/netip"
	"os"
	"os/exec"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
	v1 "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"

	"github.com/go-proxier/proxier/internal/inet"
	"github.com/go-proxier/proxier/internal/testing/backendtest"
	"github.com/go-proxier/proxier/internal/testing/confine"
	"github.com/go-proxier/proxier/internal/testing/must"
	"github.com/go-proxier/proxier/internal/testing/netlab"
	"github.com/go-proxier/proxier/internal/testing/testtime"
	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/ruleset/conformance"
	"github.com/go-proxier/proxier/ruleset/dataplane"
	"github.com/go-proxier/proxier/tracker"
)

var (
	kills     = flag.Int("kills", 5, "how often TestFaultsLoseNothing kills an agent")
	flood     = flag.Duration("flood", 2*time.Second, "how long TestFaultsLoseNothing changes objects")
	rate      = flag.Int("rate", 200, "how many objects TestFaultsLoseNothing changes in a second")
	crowd     = flag.Int("services", 40, "how many Services TestFaultsLoseNothing has while it changes objects")
	thousands = flag.Bool("thousands", false, "create and delete thousands of Services, and very large ones, in TestFaultsLoseNothing")
)

// TestFaultsLoseNothing tests a Backend under failures, damage and load, in one machine.
func TestFaultsLoseNothing(t *testing.T) {
	if !inMachine(t) {
		return
	}
	// These two are not parallel, because other tests have goroutines, files and tracked
	// connections, too.
	t.Run("changes leak nothing", testChangesLeakNothing)
	t.Run("a full conntrack table ends no connection", func(t *testing.T) { testFullConntrackEndsNoConnection(newFaultWorld(t)) })
	// The tests of a group run one after the other in one world, which takes long to make.
	for _, group := range [][]faultTest{
		{{"altered objects are repaired", testAlteredObjectsAreRepaired}, {"refused elements affect nothing else", testRefusedElementsAffectNothingElse}},
		{{"NodePorts follow addresses", testNodePortsFollowAddresses}, {"read-only sysctls are reported", testReadOnlySysctlsAreReported}, {"socket errors lose nothing", testSocketErrorsLoseNothing}},
		{{"killed agents lose nothing", testKilledAgentsLoseNothing}, {"affinity lasts", testAffinityLasts}, {"endpoints are chosen evenly", testEndpointsAreChosenEvenly}},
		{{"connections outlive their Service", testConnectionsOutliveTheirService}},
		{{"changed UDP endpoints lose no request", testChangedUDPEndpointsLoseNoRequest}, {"a flood of changes loses nothing", testFloodLosesNothing}},
	} {
		t.Run(group[0].name, func(t *testing.T) {
			t.Parallel()
			f := newFaultWorld(t)
			for _, c := range group {
				t.Run(c.name, func(t *testing.T) { c.run(f.of(t)) })
			}
		})
	}
	for _, c := range []struct {
		name string
		run  func(*testing.T)
	}{
		{"lists that change are read again", testChangingListsAreReadAgain},
		{"few capabilities are enough", testFewCapabilitiesAreEnough},
		{"hostile Services are served", testHostileServicesAreServed},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			c.run(t)
		})
	}
}

// faultTest is a test that runs in a world.
type faultTest struct {
	name string
	run  func(*faultWorld)
}

// of returns the world with another test to report to.
func (f *faultWorld) of(t *testing.T) *faultWorld {
	g := *f
	g.t = t
	return &g
}

// faultWorld is a world with Services whose endpoints are the world's pods: number 50 with
// a NodePort over TCP, number 51 over UDP.
type faultWorld struct {
	*conformance.World
	t       *testing.T
	backend *Backend
	// reader is another Backend, which only reads the kernel's state.
	reader *Backend
	pods   []string
	// targets is the cluster IP and NodePort of the first Service, and the cluster IP of the
	// second.
	targets []conformance.Target
	rng     *rand.Rand
}

// newFaultWorld returns a new world. Only the test calls [Backend.Retire].
func newFaultWorld(t *testing.T) *faultWorld {
	t.Helper()
	f := &faultWorld{t: t, rng: rand.New(rand.NewPCG(*backendtest.Seed, 7)), targets: []conformance.Target{
		{Addr: netip.MustParseAddrPort("10.96.0.50:80"), Protocol: v1.ProtocolTCP},
		{Addr: netip.MustParseAddrPort("192.0.2.1:30050"), Protocol: v1.ProtocolTCP},
		{Addr: netip.MustParseAddrPort("10.96.0.51:80"), Protocol: v1.ProtocolUDP},
	}}
	f.World = conformance.NewWorld(t, conformance.Options{Families: []tracker.Family{tracker.IPv4}, New: func(tb testing.TB, env conformance.Env) ruleset.Backend {
		b, err := New(tb.Context(), Config{NetNS: env.NetNS, Families: env.Families})
		if err != nil {
			tb.Fatal(err)
		}
		tb.Cleanup(func() {
			if tb.Failed() {
				describe(tb, env.Do)
			}
			b.Close()
		})
		f.backend = b
		if f.reader, err = New(tb.Context(), Config{NetNS: env.NetNS, Families: env.Families}); err != nil {
			tb.Fatal(err)
		}
		tb.Cleanup(func() { f.reader.Close() })
		return b
	}})
	f.pods = backendtest.Pods(f.World)
	setPods(f.Tracker, f.pods, len(f.pods), f.rng)
	f.Sync()
	return f
}

// setPods gives the first Service n of the pods, at least one, and the second Service all of
// them. A UDP endpoint drains for a second, and an answer may take longer in the virtual
// machine; testChangedUDPEndpointsLoseNoRequest changes UDP endpoints.
func setPods(t *tracker.Tracker, pods []string, n int, rng *rand.Rand) {
	t.SetService(svc(50, nodePort(30050)))
	t.SetSlice(podSlice(50, v1.ProtocolTCP, pods, n, rng))
	t.SetService(svc(51, over(v1.ProtocolUDP)))
	t.SetSlice(podSlice(51, v1.ProtocolUDP, pods, len(pods), rng))
}

func podSlice(i int, p v1.Protocol, pods []string, n int, rng *rand.Rand) *discovery.EndpointSlice {
	es := slice(i, p)
	backendtest.AddPods(es, pods, n, rng)
	return es
}

// run runs programs, separated by "; ", on the node and returns the lines of their output.
func (f *faultWorld) run(commands string) []string {
	f.t.Helper()
	out, err := f.try(commands)
	if err != nil {
		f.t.Fatal(err)
	}
	return out
}

func (f *faultWorld) try(commands string) (list []string, err error) {
	for command := range strings.SplitSeq(commands, "; ") {
		args := strings.Fields(command)
		cmd := netlab.Command(f.t, args[0], args[1:]...)
		var out, stderr strings.Builder
		cmd.Stdout, cmd.Stderr = &out, &stderr
		if err := f.Do(cmd.Start); err != nil {
			return nil, err
		}
		if err := cmd.Wait(); err != nil {
			return nil, fmt.Errorf("%s: %w: %s", command, err, stderr.String())
		}
		for l := range strings.Lines(out.String()) {
			list = append(list, strings.Join(strings.Fields(l), " "))
		}
	}
	return list, nil
}

// kernel returns the kernel's state as text. Programs start slowly in the virtual machine,
// so a Backend reads everything except the rules.
func (f *faultWorld) kernel() string {
	f.t.Helper()
	out := []string{""}
	sys := systemOf(f.reader)
	sys.index = -1
	device := sys.findDevice()
	if link, err := sys.link(); err == nil {
		sys.index, device = link.Attrs().Index, nil
	}
	found, err := f.reader.readFamily(tracker.IPv4, time.Now())
	if err != nil {
		f.t.Fatal(err)
	}
	for k, v := range found.virtuals {
		out = append(out, fmt.Sprint("virtual ", k, v.virtual))
		for at, r := range v.reals {
			out = append(out, fmt.Sprint(k, " has ", at, " ", r))
		}
	}
	for e := range found.entries.All() {
		out = append(out, fmt.Sprintf("%s %s %d %d %s %#x", e.set.name(tracker.IPv4), e.addr, e.proto, e.port, e.other, found.entryMarks[e]))
	}
	out = append(out, fmt.Sprint("device: ", device))
	for a := range found.bound.All() {
		out = append(out, fmt.Sprint("bound: ", a))
	}
	slices.Sort(out)
	return strings.Join(append(out, withoutComments(f.run("iptables-save"))...), "\n")
}

// difference returns the lines that are in only one of two texts.
func difference(got, want string) string {
	g, w := strings.Split(got, "\n"), strings.Split(want, "\n")
	out := ""
	for _, l := range missing(g, w) {
		out += "+ " + l + "\n"
	}
	for _, l := range missing(w, g) {
		out += "- " + l + "\n"
	}
	if out == "" {
		out = "the same lines in another order or number"
	}
	return out
}

// loseNothing opens connections while do runs. It fails the test if one of them fails, or if
// a connection that was open before is lost.
func (f *faultWorld) loseNothing(do func()) {
	f.t.Helper()
	backendtest.Unharmed(f.t, f.World, f.targets, do)
}

// restartWritesNothing attaches a new Backend, as a new process would. It must find
// everything in place and write nothing.
func (f *faultWorld) restartWritesNothing() {
	f.t.Helper()
	// A draining real server may drain at any time, and the new process would then delete it.
	f.backend.config.DrainLimit = time.Hour
	err := f.backend.tend(context.Background(), time.Now().Add(time.Hour))
	f.backend.config.DrainLimit = 0
	if err != nil {
		f.t.Fatal(err)
	}
	if n := f.backend.draining(); n != 0 {
		f.t.Fatalf("%d real servers still drain", n)
	}
	before := f.kernel()
	b, err := New(context.Background(), Config{NetNS: f.Env.NetNS, Families: f.Env.Families})
	if err != nil {
		f.t.Fatal(err)
	}
	defer b.Close()
	c := f.Engine.Attach("next", b)
	defer c.Detach()
	made := count(b)
	if err := c.Sync(context.Background()); err != nil {
		f.t.Fatal(err)
	}
	// The backend creates and lists each set, and lists everything else once.
	if got, want := made.servers, 1+strings.Count(before, "\nvirtual "); got != want {
		f.t.Errorf("a new process made %d requests to IPVS, want %d", got, want)
	}
	if got, want := made.sets, 2*int(setCount); got != want {
		f.t.Errorf("a new process made %d requests about sets, want %d", got, want)
	}
	if got := made.addrs; got != 2 {
		f.t.Errorf("a new process made %d requests about addresses, want 2", got)
	}
	if err := b.Check(context.Background()); err != nil {
		f.t.Error(err)
	}
	if after := f.kernel(); after != before {
		f.t.Errorf("a new process changed the kernel's state:\n%s", difference(after, before))
	}
}

// testAlteredObjectsAreRepaired runs other programs that alter the backend's objects and have
// objects of their own. Check must report the damage, undamaged targets must serve, and the
// next full delta must repair everything and keep open connections.
func testAlteredObjectsAreRepaired(f *faultWorld) {
	t := f.t
	ctx := context.Background()
	foreign := []string{
		"ipvsadm -A -t 203.0.113.9:99 -s lc", "ipvsadm -a -t 203.0.113.9:99 -r 203.0.113.10:99 -m -w 3",
		"ipvsadm -A -t 192.0.2.1:99 -s rr", "ipvsadm -A -f 77 -s rr", "ipset create mine hash:ip", "ipset add mine 192.0.2.77",
		"iptables -t nat -N MINE", "iptables -t nat -A MINE -m set --match-set mine src -j RETURN", "iptables -t nat -I PREROUTING -d 203.0.113.9 -j MINE",
		"iptables -t nat -A POSTROUTING -s 203.0.113.9 -j MASQUERADE", "iptables -t mangle -I INPUT -d 203.0.113.9 -j ACCEPT",
		"iptables -I INPUT -d 203.0.113.9 -j ACCEPT", "iptables -A FORWARD -d 203.0.113.9 -j DROP", "ip link add theirs type dummy",
	}
	f.loseNothing(func() {
		f.run(strings.Join(foreign, "; "))
		before := f.kernel()
		if err := f.backend.Check(ctx); err != nil {
			t.Errorf("Check reports foreign objects as drift: %v", err)
		}
		setPods(f.Tracker, f.pods, 2, f.rng)
		f.Sync()
		f.Cursor.Resync()
		f.Sync()
		setPods(f.Tracker, f.pods, len(f.pods), f.rng)
		f.Sync()
		if after := f.kernel(); after != before {
			t.Errorf("foreign objects, or their order, changed:\n%s", difference(after, before))
		}
	})
	pod, cluster := f.pods[0], "10.96.0.50:80"
	const fine, cut = true, false
	isForeign := func(l string) bool {
		for _, s := range []string{"203.0.113", "mine", "MINE", ":99 ", "FWM 77"} {
			if strings.Contains(l, s) {
				return true
			}
		}
		return false
	}
	type lives int
	const (
		// some: since Linux 5.9 the kernel ends connections to a deleted real server
		// (expire_nodest_conn).
		some lives = iota
		// notMasqueraded: the kernel stops translating addresses, also of open connections,
		// when no table has a chain of nat any more (nf_nat_unregister_fn of
		// net/netfilter/nf_nat_core.c), as after "iptables -X" of iptables-nft. Packets then
		// reach endpoints with the client's own address, and the endpoints reset the
		// connection.
		notMasqueraded
		all
	)
	before := slices.DeleteFunc(strings.Split(f.kernel(), "\n"), isForeign)
	for _, c := range []struct {
		do string
		// lives selects the open connections that must survive.
		lives lives
		// serves reports which targets must serve new connections before the repair; nil
		// where that depends.
		serves []bool
	}{
		{"ipvsadm -C", some, []bool{cut, cut, cut}},
		{"ipvsadm -D -t " + cluster + "; ipvsadm -d -t 192.0.2.1:30050 -r " + pod, some, []bool{cut, fine, fine}},
		{"ipvsadm -e -t " + cluster + " -r " + pod + " -m -w 0; ipvsadm -a -t " + cluster + " -r 10.244.9.9:80 -m -w 0; ipvsadm -E -t " + cluster + " -s lc", all, []bool{fine, fine, fine}},
		{"ipset flush", all, nil},

		{"ip link del kube-ipvs0", all, []bool{cut, fine, cut}},
		{"ip link del kube-ipvs0; ip link add kube-ipvs0 type dummy", all, []bool{cut, fine, cut}},
		{"iptables -t nat -F", all, nil},
		{"iptables -t nat -F; iptables -t nat -X; iptables -F; iptables -X; iptables -t mangle -D INPUT 2", notMasqueraded, nil},
	} {
		held := f.Hold(f.targets[:2])
		masqueraded, others := held.Split()
		if masqueraded.Len() == 0 || others.Len() == 0 {
			t.Errorf("%d connections are masqueraded and %d are not, want some of each", masqueraded.Len(), others.Len())
		}
		f.run(c.do)
		used := held.Send()
		checked := f.backend.Check(ctx)
		var drift *dataplane.DriftError
		if !errors.As(checked, &drift) {
			t.Errorf("%s: Check returned %v, want a DriftError", c.do, checked)
		}
		var state []string
		for i, serves := range c.serves {
			// The wait is long for an answer that must come, short for one that must not.
			wait := testtime.Timeout
			if !serves {
				wait = time.Second / 2
			}
			server, err := f.Reach(f.targets[i], wait)
			if (err == nil) != serves {
				t.Errorf("%s: %s: %v, %v", c.do, f.targets[i].Addr, server, err)
			}
			state = append(state, fmt.Sprint(err == nil))
		}
		f.Cursor.Resync()
		f.Sync()
		if err := f.backend.tend(ctx, time.Now().Add(time.Hour)); err != nil {
			t.Error(err)
		}
		if err := f.backend.Check(ctx); err != nil {
			t.Errorf("%s: not repaired: %v", c.do, err)
		}
		// Foreign objects that the program deleted, too, stay deleted.
		if now := slices.DeleteFunc(strings.Split(f.kernel(), "\n"), isForeign); !slices.Equal(now, before) {
			t.Errorf("%s: after the repair the state differs:\n%s", c.do, difference(strings.Join(now, "\n"), strings.Join(before, "\n")))
		}
		for i, to := range f.targets {
			if _, err := f.Reach(to, testtime.Timeout); err != nil {
				t.Errorf("%s: after the repair, target %d: %v", c.do, i, err)
			}
		}
		switch c.lives {
		case all:
			used = errors.Join(used, held.Check())
		case notMasqueraded:
			used = others.Check()
		default:
			used = nil
		}
		if used != nil {
			t.Errorf("%s: %v", c.do, used)
		}
		t.Logf("%s: Check returned %q; new connections before the repair: %v", c.do, checked, state)
	}
	// A set that rules use cannot be destroyed.
	if _, err := f.try("ipset destroy KUBE-CLUSTER-IP"); err == nil {
		t.Error("a set was destroyed although a rule uses it")
	}
	f.restartWritesNothing()
}

// podsEnv is the environment variable with the pods' addresses for a separate process.
const podsEnv = "PROXIER_TEST_PODS"

// changeEndpoints is an agent that changes endpoints as fast as possible until it is killed.
func changeEndpoints() error {
	ctx := context.Background()
	a, err := newAgent(Config{Families: []tracker.Family{tracker.IPv4}})
	if err != nil {
		return err
	}
	pods := strings.Fields(os.Getenv(podsEnv))
	rng := rand.New(rand.NewPCG(uint64(os.Getpid()), 1))
	for i := 0; ; i++ {
		setPods(a.tracker, pods, 1+rng.IntN(len(pods)), rng)
		// Other Services are created and deleted.
		for n := range 3 {
			if rng.IntN(2) == 0 {
				a.tracker.SetService(svc(100+n, nodePort(30100+int32(n)), externalLocal))
				a.tracker.SetSlice(slice(100+n, v1.ProtocolTCP, 1+rng.IntN(9), -1-rng.IntN(9)))
			} else {
				a.tracker.DeleteService(svcName(100 + n))
			}
		}
		if i%7 == 6 {
			a.cursor.Resync()
		}
		if err := a.cursor.Sync(ctx); err != nil {
			return err
		}
		if err := a.backend.tend(ctx, time.Now()); err != nil {
			return err
		}
		if i == 0 {
			fmt.Println("ready")
		}
	}
}

// child returns a command that runs this program in a role.
func (f *faultWorld) child(role string, l confine.Limits) *exec.Cmd {
	cmd := confine.Command(role, l)
	cmd.Env = append(cmd.Env, podsEnv+"="+strings.Join(f.pods, " "))
	return cmd
}

// testKilledAgentsLoseNothing kills an agent at random points of its work, several times,
// while clients connect to Services whose endpoints it changes.
func testKilledAgentsLoseNothing(f *faultWorld) {
	start := func(int) *exec.Cmd { return f.child("churn", confine.Limits{Capabilities: needed}) }
	f.loseNothing(func() {
		backendtest.KillAgents(f.t, f.World, *kills, start, func(ready bool) time.Duration {
			most := 1500 // ms, while the agent starts
			if ready {
				most = 300
			}
			return time.Duration(f.rng.IntN(most)) * time.Millisecond
		})
	})
	// The first full delta repairs everything.
	f.Cursor.Resync()
	f.Sync()
	f.restartWritesNothing()
}

// testSocketErrorsLoseNothing runs a separate process that lacks descriptors, buffers and
// sockets, while clients connect to the Services that it serves.
func testSocketErrorsLoseNothing(f *faultWorld) {
	few := uint64(64)
	f.loseNothingDuring(f.child("faults", confine.Limits{Capabilities: needed, Files: &few}))
}

// loseNothingDuring opens connections while a process runs on the node. The process must
// succeed, and a new process must find everything in place afterwards.
func (f *faultWorld) loseNothingDuring(cmd *exec.Cmd) {
	f.t.Helper()
	f.loseNothing(func() {
		if err := f.Do(cmd.Start); err != nil {
			f.t.Error(err)
			return
		}
		if err := cmd.Wait(); err != nil {
			f.t.Error(err)
		}
	})
	f.Cursor.Resync()
	f.Sync()
	f.restartWritesNothing()
}

// faults is the process of testSocketErrorsLoseNothing.
func faults() error {
	ctx := context.Background()
	a, err := newAgent(Config{Families: []tracker.Family{tracker.IPv4}})
	if err != nil {
		return err
	}
	pods, rng := strings.Fields(os.Getenv(podsEnv)), rand.New(rand.NewPCG(1, 1))
	change := func() error {
		setPods(a.tracker, pods, 1+rng.IntN(len(pods)), rng)
		for i := range 4 {
			a.tracker.SetService(svc(rng.IntN(8), nodePort(30000+int32(i)), externalIPs(fmt.Sprint("198.18.0.", rng.IntN(200)))))
			a.tracker.SetSlice(slice(i, v1.ProtocolTCP, 1+rng.IntN(9), -1-rng.IntN(9), -20))
			a.tracker.DeleteService(svcName(rng.IntN(8)))
		}
		return a.cursor.Sync(ctx)
	}
	// recovered returns an error unless everything is in place after a fault, including
	// changes during the fault.
	recovered := func() error {
		if err := a.cursor.Sync(ctx); err != nil {
			return err
		}
		if err := a.backend.tend(ctx, time.Now()); err != nil {
			return err
		}
		if err := a.backend.Check(ctx); err != nil {
			return err
		}
		s := a.backend.states[0]
		for _, sv := range a.engine.Snapshot().Ports {
			if sv.Key.Family != s.family {
				continue
			}
			p := a.backend.config.makePlan(sv, local{node: "node", own: func(netip.Addr) bool { return false }}, 0)
			for _, v := range p.virtuals {
				have := s.virtuals[v.key]
				if v.rejected && have == nil {
					continue
				}
				if have == nil {
					return fmt.Errorf("%v has no %v", sv.Key, v.key)
				}
				for _, ep := range v.pool {
					if have.reals[ep.Addr] == 0 {
						return fmt.Errorf("%v: %v has no %v", sv.Key, v.key, ep.Addr)
					}
				}
			}
			for _, addr := range p.bind {
				if s.bound.Users(addr) == 0 {
					return fmt.Errorf("%v: %v is not bound", sv.Key, addr)
				}
			}
		}
		return nil
	}
	if err := errors.Join(change(), recovered()); err != nil {
		return err
	}
	type fault struct {
		name    string
		do      func() (undo func() error, err error)
		changes int
	}
	list := []fault{
		{"no spare file descriptor", func() (func() error, error) {
			release := backendtest.ExhaustFiles()
			return func() error {
				release()
				return nil
			}, nil
		}, 3},
		{"frequent signals", func() (func() error, error) {
			// With a shorter interval the virtual machine does nothing else.
			return backendtest.Signals(30000)
		}, 10},
		{"overflow of address events", func() (func() error, error) {
			fd := systemOf(a.backend).events.GetFd()
			size, err := unix.GetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_RCVBUF)
			if err != nil {
				return nil, err
			}
			err = unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_RCVBUF, 1)
			return func() error { return unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_RCVBUF, size/2) }, errors.Join(err, fillWithEvents())
		}, 1},
	}
	for _, fault := range list {
		undo, err := fault.do()
		if err != nil {
			return fmt.Errorf("%s: %w", fault.name, err)
		}
		var failed error
		for range fault.changes {
			failed = errors.Join(failed, change())
		}
		if err := undo(); err != nil {
			return fmt.Errorf("%s: undo: %w", fault.name, err)
		}
		if failed != nil {
			return fmt.Errorf("%s: %w", fault.name, failed)
		}
		if err := recovered(); err != nil {
			return fmt.Errorf("after %s: %w", fault.name, err)
		}
		if err := checkSockets(); err != nil {
			return fmt.Errorf("after %s: %w", fault.name, err)
		}
	}
	return checkSockets()
}

// fillWithEvents makes the kernel send events about addresses.
func fillWithEvents() error {
	h, err := netlink.NewHandle(unix.NETLINK_ROUTE)
	if err != nil {
		return err
	}
	defer h.Close()
	lo, err := h.LinkByName("lo")
	if err != nil {
		return err
	}
	a, err := netlink.ParseAddr("127.0.0.9/32")
	if err != nil {
		return err
	}
	for range 40 {
		if err := errors.Join(h.AddrAdd(lo, a), h.AddrDel(lo, a)); err != nil {
			return err
		}
	}
	return nil
}

// checkSockets returns an error unless the process has exactly the netlink sockets that a
// Backend needs.
func checkSockets() error {
	sockets, err := netlinkSockets()
	if err != nil {
		return err
	}
	count := map[int]int{}
	for protocol, fds := range sockets {
		count[protocol] = len(fds)
	}
	if want := map[int]int{unix.NETLINK_ROUTE: 2, unix.NETLINK_NETFILTER: 1, unix.NETLINK_GENERIC: 1}; !maps.Equal(count, want) {
		return fmt.Errorf("the netlink sockets are, by protocol, %v, want %v", count, want)
	}
	return nil
}

// netlinkSockets returns the descriptors of the process's netlink sockets by protocol.
func netlinkSockets() (map[int][]int, error) {
	entries, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		return nil, err
	}
	out := map[int][]int{}
	for _, e := range entries {
		fd, err := strconv.Atoi(e.Name())
		if err != nil {
			return nil, err
		}
		domain, _ := unix.GetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_DOMAIN)
		protocol, err := unix.GetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_PROTOCOL)
		if err == nil && domain == unix.AF_NETLINK {
			out[protocol] = append(out[protocol], fd)
		}
	}
	return out, nil
}

// testRefusedElementsAffectNothingElse makes the kernel refuse single elements of many
// Services. Everything else must be in effect, including the rest of the same Service, and no
// connection may be lost.
func testRefusedElementsAffectNothingElse(f *faultWorld) {
	t := f.t
	ctx := context.Background()
	const services, bad = 30, 7
	setAll := func(n int) {
		for i := range services {
			f.Tracker.SetService(svc(100+i, nodePort(30100+int32(i))))
			f.Tracker.SetSlice(slice(100+i, v1.ProtocolTCP, 1+n, -1-n, -20-n))
		}
	}
	// refused syncs, which must fail for one Service with the error.
	refused := func(what string, want error) {
		t.Helper()
		err := f.Do(func() error { return f.Cursor.Sync(ctx) })
		var partial *ruleset.PartialError
		if !errors.As(err, &partial) || len(partial.Failed) != 1 || !errors.Is(err, want) {
			t.Errorf("%s: %v, want one Service with %v", what, err, want)
			return
		}
		for k := range partial.Failed {
			if k.Name != svcName(100+bad).Name {
				t.Errorf("%s: %v failed", what, k)
			}
		}
	}
	expect := func(what string, n int, but ...int) {
		t.Helper()
		found, err := f.reader.readFamily(tracker.IPv4, time.Now())
		if err != nil {
			t.Fatal(err)
		}
		for i := range services {
			v := found.virtuals[virtualKey{family: tracker.IPv4, proto: inet.TCP, at: netip.MustParseAddrPort(clusterIP(100+i) + ":80")}]
			if slices.Contains(but, i) {
				continue
			}
			if v == nil {
				t.Errorf("%s: Service %d has no virtual server", what, i)
				continue
			}
			for _, at := range []string{fmt.Sprintf("10.244.1.%d:8080", 1+n), fmt.Sprintf("10.245.0.%d:8080", 1+n), fmt.Sprintf("10.245.0.%d:8080", 20+n)} {
				if v.reals[netip.MustParseAddrPort(at)] == 0 {
					t.Errorf("%s: Service %d has no %s: %v", what, i, at, v.reals)
				}
			}
		}
	}
	f.loseNothing(func() {
		setAll(0)
		f.Sync()
		expect("before", 0)

		// The kernel refuses a broadcast address among a Service's endpoints.
		setAll(1)
		es := slice(100+bad, v1.ProtocolTCP, 2, -2, -21)
		es.Endpoints = slices.Insert(es.Endpoints, 1, discovery.Endpoint{Addresses: []string{"192.0.2.255"}})
		f.Tracker.SetSlice(es)
		f.Tracker.SetService(svc(100+bad, nodePort(30100+bad), externalIPs("198.18.0.7")))
		refused("an endpoint", unix.EINVAL)
		expect("an endpoint", 1)
		if got := f.run("ip -o addr show dev kube-ipvs0"); !strings.Contains(strings.Join(got, "\n"), "198.18.0.7/32") {
			t.Errorf("a new address of a Service with a refused endpoint is not bound: %v", got)
		}
		if err := f.backend.Check(ctx); err != nil {
			t.Error(err)
		}
		// Further attempts change nothing else. First, replaced real servers drain.
		if err := f.backend.tend(ctx, time.Now().Add(time.Minute)); err != nil {
			t.Error(err)
		}
		before := f.kernel()
		refused("an endpoint, again", unix.EINVAL)
		f.Cursor.Resync()
		refused("an endpoint, in a full delta", unix.EINVAL)
		if err := f.backend.tend(ctx, time.Now()); err != nil {
			t.Error(err)
		}
		if after := f.kernel(); after != before {
			t.Errorf("another attempt with a refused endpoint changed:\n%s", difference(after, before))
		}
		setAll(1)
		f.Sync()
		expect("without the endpoint", 1)

		// A set is full.
		f.run("ipset create full hash:ip,port maxelem 2; ipset add full 10.96.0.50,tcp:80; ipset add full 10.96.0.51,udp:80; ipset swap full KUBE-EXTERNAL-IP")
		setAll(2)
		f.Tracker.SetService(svc(100+bad, externalIPs("198.18.0.8")))
		err := f.Do(func() error { return f.Cursor.Sync(ctx) })
		var partial *ruleset.PartialError
		if !errors.As(err, &partial) || len(partial.Failed) != 1 {
			t.Errorf("a full set: %v", err)
		}
		expect("a full set", 2)
		f.run("ipset swap full KUBE-EXTERNAL-IP; ipset destroy full")
		f.Cursor.Resync()
		f.Sync()
		expect("a set with room", 2)
	})
	f.restartWritesNothing()
}

// testNodePortsFollowAddresses adds and removes addresses of the node. NodePorts must answer at
// new addresses immediately, and at all others without interruption.
func testNodePortsFollowAddresses(f *faultWorld) {
	t := f.t
	ctx := context.Background()
	added := conformance.Target{Addr: netip.MustParseAddrPort("192.0.2.77:30050"), Protocol: v1.ProtocolTCP}
	tend := func() {
		t.Helper()
		if err := f.backend.tend(ctx, time.Now()); err != nil {
			t.Error(err)
		}
	}
	f.loseNothing(func() {
		for range 3 {
			f.run("ip addr add 192.0.2.77/32 dev lo")
			tend()
			if _, err := f.Reach(added, testtime.Timeout); err != nil {
				t.Error(err)
			}
			f.run("ip addr del 192.0.2.77/32 dev lo")
			tend()
			if server, err := f.Reach(added, time.Second/2); err == nil {
				t.Errorf("%s answered at a deleted address", server)
			}
			if got := strings.Join(f.run("ipvsadm -Sn"), "\n"); strings.Contains(got, "-A -t 192.0.2.77:30050") && !strings.Contains(got, "192.0.2.77:30050 -r") {
				t.Errorf("a virtual server without connections is left: %s", got)
			}
			if err := f.backend.Check(ctx); err != nil {
				t.Error(err)
			}
		}
	})
	// The node's primary address is deleted while connections are open, and added again before
	// the clients time out.
	held := f.Hold(f.targets[1:2])
	f.run("ip addr del 192.0.2.1/24 dev eth0")
	tend()
	f.run("ip addr add 192.0.2.1/24 dev eth0; ip route replace default via 192.0.2.10")
	tend()
	if _, err := f.Reach(f.targets[1], testtime.Timeout); err != nil {
		t.Error(err)
	}
	if err := held.Check(); err != nil {
		t.Error(err)
	}
	if err := f.backend.Check(ctx); err != nil {
		t.Error(err)
	}
}

// testChangingListsAreReadAgain syncs while other programs change addresses and virtual servers,
// in the same and another network namespace. The backend must read interrupted lists again and
// ignore objects that were deleted after it listed them. In the end everything must be in place.
func testChangingListsAreReadAgain(t *testing.T) {
	const services = 60
	r := newRig(t, newHost(t), Config{Families: []tracker.Family{tracker.IPv4}})
	for i := range services {
		r.set(svc(i), i, -1, -2)
	}
	r.sync()
	stop := make(chan struct{})
	var others []chan error
	for _, h := range []*netlab.Host{r.host(), newHost(t)} {
		b, err := New(t.Context(), Config{NetNS: h.File(), Families: []tracker.Family{tracker.IPv4}})
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { b.Close() })
		link, err := systemOf(b).route.LinkByName("eth0")
		if err != nil {
			t.Fatal(err)
		}
		systemOf(b).index = link.Attrs().Index
		done := make(chan error, 1)
		others = append(others, done)
		go func() {
			for i := 0; ; i++ {
				select {
				case <-stop:
					done <- nil
					return
				default:
				}
				a := netip.AddrFrom4([4]byte{198, 18, byte(i >> 8 & 1), byte(i)})
				k := virtualKey{family: tracker.IPv4, proto: inet.TCP, at: netip.AddrPortFrom(a, 99)}
				if err := errors.Join(b.kernel.addVirtual(k, virtual{scheduler: RoundRobin}), b.kernel.bind(a), b.kernel.delVirtual(k), b.kernel.unbind(a)); err != nil {
					done <- err
					return
				}
				time.Sleep(time.Millisecond)
			}
		}()
	}

	failures := 0
	for i := range 4 {
		r.set(svc(i), i, -1, -3-i)
		if i%2 == 0 {
			r.cursor.Resync()
		}
		// A sync fails if ten lists of addresses in a row are interrupted.
		if err := r.cursor.Sync(context.Background()); err != nil {
			failures++
			if !errors.Is(err, netlink.ErrDumpInterrupted) {
				t.Error(err)
			}
		}
	}
	close(stop)
	for _, done := range others {
		if err := <-done; err != nil {
			t.Error(err)
		}
	}
	t.Logf("%d of 4 syncs failed", failures)
	r.sync()
	must.Do(t, r.backend.tend(context.Background(), time.Now()))
	r.agree()
	if err := r.backend.Check(context.Background()); err != nil {
		t.Error(err)
	}
}

// testReadOnlySysctlsAreReported starts an agent that cannot write kernel parameters. If they
// have the right values, the agent works. If not, its sync must report the parameter, and the
// existing virtual servers must serve.
func testReadOnlySysctlsAreReported(f *faultWorld) {
	cmd := f.child("sysctl", confine.Limits{Capabilities: append([]int{unix.CAP_SYS_ADMIN}, needed...)})
	cmd.SysProcAttr = &syscall.SysProcAttr{Unshareflags: syscall.CLONE_NEWNS}
	f.loseNothingDuring(cmd)
}

func readOnlySysctls() error {
	const dir = "/proc/sys"
	if err := unix.Mount(dir, dir, "", unix.MS_BIND|unix.MS_REC, ""); err != nil {
		return fmt.Errorf("mount: %w", err)
	}
	remount := func(flags uintptr) error {
		if err := unix.Mount("", dir, "", unix.MS_BIND|unix.MS_REMOUNT|flags, ""); err != nil {
			return fmt.Errorf("remount: %w", err)
		}
		return nil
	}
	ctx := context.Background()
	c := Config{Families: []tracker.Family{tracker.IPv4}}
	a, err := newAgent(c)
	if err != nil {
		return err
	}
	setPods(a.tracker, strings.Fields(os.Getenv(podsEnv)), 3, rand.New(rand.NewPCG(1, 1)))
	if err := remount(unix.MS_RDONLY); err != nil {
		return err
	}
	if err := a.cursor.Sync(ctx); err != nil {
		return fmt.Errorf("with the right values: %w", err)
	}
	if err := errors.Join(remount(0), os.WriteFile(dir+"/net/ipv4/vs/expire_quiescent_template", []byte("0"), 0), remount(unix.MS_RDONLY)); err != nil {
		return err
	}
	a.cursor.Resync()
	if err := a.cursor.Sync(ctx); !errors.Is(err, syscall.EROFS) || !strings.Contains(err.Error(), "net/ipv4/vs/expire_quiescent_template") {
		return fmt.Errorf("with a wrong value that cannot be set: %w, want EROFS and its name", err)
	}
	if err := errors.Join(remount(0), a.cursor.Sync(ctx)); err != nil {
		return fmt.Errorf("with a wrong value that can be set: %w", err)
	}
	return a.backend.Check(ctx)
}

// testFullConntrackEndsNoConnection fills the kernel's table of tracked connections. Syncs must
// succeed, open connections must survive, and new ones must succeed when the table has room.
func testFullConntrackEndsNoConnection(f *faultWorld) {
	t := f.t
	const most = "/proc/sys/net/netfilter/nf_conntrack_max"
	old, err := os.ReadFile(most)
	if err != nil {
		t.Fatal(err)
	}
	held := f.Hold(f.targets)
	before := f.kernel()
	set := func(value string) {
		t.Helper()
		must.Do(t, os.WriteFile(most, []byte(value), 0))
	}
	t.Cleanup(func() { set(strings.TrimSpace(string(old))) })
	set("1")
	for _, to := range f.targets {
		if server, err := f.Reach(to, time.Second/2); err == nil {
			t.Errorf("%s answered although no connection can be tracked", server)
		}
	}
	setPods(f.Tracker, f.pods, 2, f.rng)
	f.Sync()
	setPods(f.Tracker, f.pods, len(f.pods), f.rng)
	f.Sync()
	f.Cursor.Resync()
	f.Sync()
	if err := f.backend.Check(context.Background()); err != nil {
		t.Error(err)
	}
	if after := f.kernel(); after != before {
		t.Errorf("the kernel's state changed:\n%s", difference(after, before))
	}
	if err := held.Check(); err != nil {
		t.Errorf("with a full table: %v", err)
	}
	set(strings.TrimSpace(string(old)))
	for _, to := range f.targets {
		if _, err := f.Reach(to, testtime.Timeout); err != nil {
			t.Errorf("with room in the table: %v", err)
		}
	}
	if err := held.Check(); err != nil {
		t.Errorf("with room in the table: %v", err)
	}
}
