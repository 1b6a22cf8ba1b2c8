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

	"github.com/go-proxier/proxier/internal/backendtest"
	"github.com/go-proxier/proxier/internal/confine"
	"github.com/go-proxier/proxier/internal/inet"
	"github.com/go-proxier/proxier/internal/netlab"
	"github.com/go-proxier/proxier/internal/testtime"
	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/ruleset/conformance"
	"github.com/go-proxier/proxier/tracker"
)

var (
	kills    = flag.Int("kills", 5, "how often TestUnderFire kills an agent")
	flood    = flag.Duration("flood", 2*time.Second, "for how long TestUnderFire changes objects")
	rate     = flag.Int("rate", 200, "how many objects TestUnderFire changes in a second")
	crowd    = flag.Int("services", 40, "of how many Services TestUnderFire changes the objects")
	thorough = flag.Bool("thorough", false, "have TestUnderFire make and remove thousands of Services, and very large ones")
)

// TestUnderFire is everything that may befall a Backend, in one machine.
func TestUnderFire(t *testing.T) {
	if !inMachine(t) {
		return
	}
	// Others have goroutines and files, too, and connections to be tracked.
	t.Run("leaks", testLeaks)
	t.Run("conntrack full", func(t *testing.T) { testConntrackFull(newFire(t)) })
	// Those in a group share a world, which takes a while to make, one after the other.
	for _, group := range [][]fireTest{
		{{"altered by others", testAlteredByOthers}, {"refused", testRefused}},
		{{"addresses come and go", testAddressesComeAndGo}, {"sysctls read-only", testSysctlsReadOnly}, {"sockets", testSockets}},
		{{"killed", testKilled}, {"affinity", testAffinityLasts}, {"choice", testChoice}},
		{{"UDP endpoints", testUDPEndpoints}, {"flood", testFlood}},
	} {
		t.Run(group[0].name, func(t *testing.T) {
			t.Parallel()
			f := newFire(t)
			for _, c := range group {
				t.Run(c.name, func(t *testing.T) { c.run(f.of(t)) })
			}
		})
	}
	for _, c := range []struct {
		name string
		run  func(*testing.T)
	}{
		{"changing lists", testChangingLists},
		{"least privilege", testLeastPrivilege},
		{"limits", testLimits},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			c.run(t)
		})
	}
}

// fireTest is what is done in a world.
type fireTest struct {
	name string
	run  func(*fire)
}

// of has the world report to another test.
func (f *fire) of(t *testing.T) *fire {
	g := *f
	g.t = t
	return &g
}

// fire is a world with Services whose endpoints are the world's pods: number 50 with
// a NodePort over TCP, number 51 over UDP.
type fire struct {
	*conformance.World
	t       *testing.T
	backend *Backend
	// eyes is another one, which is only looked by.
	eyes *Backend
	pods []string
	// targets is where they are: cluster IP and NodePort of the first, cluster IP of
	// the second.
	targets []conformance.Target
	rng     *rand.Rand
}

// newFire makes the world. Nobody calls [Backend.Tend] there but the test.
func newFire(t *testing.T) *fire {
	t.Helper()
	f := &fire{t: t, rng: rand.New(rand.NewPCG(*backendtest.Seed, 7)), targets: []conformance.Target{
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
				describe(tb, env)
			}
			b.Close()
		})
		f.backend = b
		if f.eyes, err = New(tb.Context(), Config{NetNS: env.NetNS, Families: env.Families}); err != nil {
			tb.Fatal(err)
		}
		tb.Cleanup(func() { f.eyes.Close() })
		return b
	}})
	f.pods = backendtest.Pods(f.World)
	hand(f.Tracker, f.pods, len(f.pods), f.rng)
	f.Sync()
	return f
}

// hand gives the first Service so many of the pods, at least one. Of the second, which
// has all of them, none goes: an answer that takes longer than the second for which a
// UDP endpoint lingers would be lost, and in the virtual machine it may. testUDPEndpoints
// sees to those.
func hand(t *tracker.Tracker, pods []string, n int, rng *rand.Rand) {
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

// run runs programs on the node, with "; " between them, and returns the lines of
// their output.
func (f *fire) run(commands string) []string {
	f.t.Helper()
	out, err := f.try(commands)
	if err != nil {
		f.t.Fatal(err)
	}
	return out
}

func (f *fire) try(commands string) (list []string, err error) {
	for command := range strings.SplitSeq(commands, "; ") {
		args := strings.Fields(command)
		cmd := exec.Command(args[0], args[1:]...)
		var out, said strings.Builder
		cmd.Stdout, cmd.Stderr = &out, &said
		if err := f.Do(cmd.Start); err != nil {
			return nil, err
		}
		if err := cmd.Wait(); err != nil {
			return nil, fmt.Errorf("%s: %w: %s", command, err, said.String())
		}
		for l := range strings.Lines(out.String()) {
			list = append(list, strings.Join(strings.Fields(l), " "))
		}
	}
	return list, nil
}

// kernel returns everything that the kernel holds. Starting programs takes long in the
// virtual machine, so all but the rules is read by what the backend reads with.
func (f *fire) kernel() string {
	f.t.Helper()
	out := []string{""}
	f.eyes.device.index = -1
	there := f.eyes.device.find()
	if link, err := f.eyes.device.link(); err == nil {
		f.eyes.device.index, there = link.Attrs().Index, nil
	}
	found, err := f.eyes.readFamily(tracker.IPv4, time.Now())
	if err != nil {
		f.t.Fatal(err)
	}
	for k, v := range found.virtuals {
		out = append(out, fmt.Sprint("virtual ", k, v.virtual))
		for at, r := range v.reals {
			out = append(out, fmt.Sprint(k, " has ", at, " ", r))
		}
	}
	for e, s := range found.entries {
		out = append(out, fmt.Sprintf("%s %s %d %d %s %#x", e.set.name(tracker.IPv4), e.addr, e.proto, e.port, e.other, s.value))
	}
	out = append(out, fmt.Sprint("device: ", there))
	for a := range found.bound {
		out = append(out, fmt.Sprint("bound: ", a))
	}
	slices.Sort(out)
	return strings.Join(append(out, withoutComments(f.run("iptables-save"))...), "\n")
}

// difference returns the lines of two texts that the other does not have.
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

// unharmed connects throughout what is done, and fails the test if one connection
// does not come about, or one that was open before does not live to the end.
func (f *fire) unharmed(do func()) {
	f.t.Helper()
	backendtest.Unharmed(f.t, f.World, f.targets, do)
}

// adopted has a new process take over: it finds all as it is to be and writes
// nothing.
func (f *fire) adopted() {
	f.t.Helper()
	// What drains may have drained by now.
	if err := f.backend.Tend(context.Background(), time.Now().Add(time.Hour)); err != nil {
		f.t.Fatal(err)
	}
	before := f.kernel()
	b, err := New(context.Background(), Config{NetNS: f.Env.NetNS, Families: f.Env.Families})
	if err != nil {
		f.t.Fatal(err)
	}
	defer b.Close()
	c := f.Engine.Attach("next", b)
	defer c.Detach()
	b.kernel.calls, b.sets.calls, b.device.calls = 0, 0, 0
	if err := c.Sync(context.Background()); err != nil {
		f.t.Fatal(err)
	}
	// The virtual servers are listed twice or a few times more, all sets are created,
	// found there, looked at and listed, and everything else is listed once.
	least := 2 + strings.Count(before, "\nvirtual ") + len(b.states[0].retired)
	if got := b.kernel.calls; got < least || got > least+18 {
		f.t.Errorf("a new process has made %d requests of IPVS, %d expected", got, least)
	}
	if got, want := b.sets.calls, 3*int(setCount); got > want {
		f.t.Errorf("a new process has made %d requests about sets, %d expected", got, want)
	}
	if got := b.device.calls; got > 3 {
		f.t.Errorf("a new process has made %d requests about addresses, 3 expected", got)
	}
	if err := b.Check(context.Background()); err != nil {
		f.t.Error(err)
	}
	if after := f.kernel(); after != before {
		f.t.Errorf("a new process has left something else than there was:\n%s", difference(after, before))
	}
}

// testAlteredByOthers has others alter what the backend has made, and have things of
// their own: what is the matter is told, what can be is served meanwhile, and all is
// as it was after the next full delta, with the connections that were open.
func testAlteredByOthers(f *fire) {
	t := f.t
	ctx := context.Background()
	foreign := []string{
		"ipvsadm -A -t 203.0.113.9:99 -s lc", "ipvsadm -a -t 203.0.113.9:99 -r 203.0.113.10:99 -m -w 3",
		"ipvsadm -A -t 192.0.2.1:99 -s rr", "ipvsadm -A -f 77 -s rr", "ipset create mine hash:ip", "ipset add mine 192.0.2.77",
		"iptables -t nat -N MINE", "iptables -t nat -A MINE -m set --match-set mine src -j RETURN", "iptables -t nat -I PREROUTING -d 203.0.113.9 -j MINE",
		"iptables -t nat -A POSTROUTING -s 203.0.113.9 -j MASQUERADE", "iptables -t mangle -I INPUT -d 203.0.113.9 -j ACCEPT",
		"iptables -I INPUT -d 203.0.113.9 -j ACCEPT", "iptables -A FORWARD -d 203.0.113.9 -j DROP", "ip link add theirs type dummy",
	}
	f.unharmed(func() {
		f.run(strings.Join(foreign, "; "))
		before := f.kernel()
		if err := f.backend.Check(ctx); err != nil {
			t.Errorf("what others have is taken for drift: %v", err)
		}
		hand(f.Tracker, f.pods, 2, f.rng)
		f.Sync()
		f.Cursor.Resync()
		f.Sync()
		hand(f.Tracker, f.pods, len(f.pods), f.rng)
		f.Sync()
		if after := f.kernel(); after != before {
			t.Errorf("others' things, or where they stand, were changed:\n%s", difference(after, before))
		}
	})
	pod, cluster := f.pods[0], "10.96.0.50:80"
	const fine, cut = true, false
	theirs := func(l string) bool {
		for _, s := range []string{"203.0.113", "mine", "MINE", ":99 ", "FWM 77"} {
			if strings.Contains(l, s) {
				return true
			}
		}
		return false
	}
	type lives int
	const (
		// some: those to a real server that was deleted are ended by the kernel
		// (expire_nodest_conn, since Linux 5.9).
		some lives = iota
		// notMasqueraded: the kernel stops translating addresses, also of connections that
		// are open, when nobody has a chain of nat any more (nf_nat_unregister_fn of
		// net/netfilter/nf_nat_core.c), as "iptables -X" sees to where iptables is
		// iptables-nft. Then packets reach endpoints with the client's own address, and
		// are answered by a reset.
		notMasqueraded
		all
	)
	before := slices.DeleteFunc(strings.Split(f.kernel(), "\n"), theirs)
	for _, c := range []struct {
		do string
		// lives is which of the connections do that are open and used meanwhile.
		lives lives
		// serves is which of the targets serve new ones meanwhile, nil where that depends.
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
			t.Errorf("%d connections are masqueraded, %d are not", masqueraded.Len(), others.Len())
		}
		f.run(c.do)
		used := held.Send()
		said := f.backend.Check(ctx)
		var drift *ruleset.DriftError
		if !errors.As(said, &drift) {
			t.Errorf("%s: Check says %v", c.do, said)
		}
		var state []string
		for i, serves := range c.serves {
			// Generously for what must come, shortly for what must not.
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
		if err := f.backend.Tend(ctx, time.Now().Add(time.Hour)); err != nil {
			t.Error(err)
		}
		if err := f.backend.Check(ctx); err != nil {
			t.Errorf("%s: not put right: %v", c.do, err)
		}
		// What is others', and was taken away with the rest, does not come back by itself.
		if now := slices.DeleteFunc(strings.Split(f.kernel(), "\n"), theirs); !slices.Equal(now, before) {
			t.Errorf("%s: put right, there is something else than before:\n%s", c.do, difference(strings.Join(now, "\n"), strings.Join(before, "\n")))
		}
		for i, to := range f.targets {
			if _, err := f.Reach(to, testtime.Timeout); err != nil {
				t.Errorf("%s: put right, target %d: %v", c.do, i, err)
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
		t.Logf("%s: Check said %q; meanwhile new connections came about: %v", c.do, said, state)
	}
	// A set that rules use cannot be destroyed.
	if _, err := f.try("ipset destroy KUBE-CLUSTER-IP"); err == nil {
		t.Error("a set was destroyed although a rule uses it")
	}
	f.adopted()
}

// podsEnv is the addresses of the pods, for a process of its own.
const podsEnv = "PROXIER_TEST_PODS"

// changeEndpoints is an agent that changes endpoints as fast as it can, until it is
// killed.
func changeEndpoints() error {
	ctx := context.Background()
	a, err := newAgent(Config{Families: []tracker.Family{tracker.IPv4}})
	if err != nil {
		return err
	}
	pods := strings.Fields(os.Getenv(podsEnv))
	rng := rand.New(rand.NewPCG(uint64(os.Getpid()), 1))
	for i := 0; ; i++ {
		hand(a.tracker, pods, 1+rng.IntN(len(pods)), rng)
		// Others, that come and go.
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
		if err := a.backend.Tend(ctx, time.Now()); err != nil {
			return err
		}
		if i == 0 {
			fmt.Println("ready")
		}
	}
}

// child starts this program in a role, on the node.
func (f *fire) child(role string, l confine.Limits) *exec.Cmd {
	cmd := confine.Command(role, l)
	cmd.Env = append(cmd.Env, podsEnv+"="+strings.Join(f.pods, " "))
	return cmd
}

// testKilled kills an agent at random points of its work, again and again, while
// connections are made to Services whose endpoints it changes.
func testKilled(f *fire) {
	start := func(int) *exec.Cmd { return f.child("churn", confine.Limits{Capabilities: needed}) }
	f.unharmed(func() {
		backendtest.KillAgents(f.t, f.World, *kills, start, func(ready bool) time.Duration {
			most := 1500 // ms, of its start
			if ready {
				most = 300
			}
			return time.Duration(f.rng.IntN(most)) * time.Millisecond
		})
	})
	// Whoever comes next has everything as it should be at once.
	f.Cursor.Resync()
	f.Sync()
	f.adopted()
}

// testSockets has all that sockets and a process can run out of go wrong in a process
// of its own, while connections are made to the Services that it serves.
func testSockets(f *fire) {
	few := uint64(64)
	f.unharmedBy(f.child("faults", confine.Limits{Capabilities: needed, Files: &few}))
}

// unharmedBy connects while a process runs on the node, which must succeed. A new
// process finds everything in place afterwards.
func (f *fire) unharmedBy(cmd *exec.Cmd) {
	f.t.Helper()
	f.unharmed(func() {
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
	f.adopted()
}

// faults is a process to which all that happens.
func faults() error {
	ctx := context.Background()
	a, err := newAgent(Config{Families: []tracker.Family{tracker.IPv4}})
	if err != nil {
		return err
	}
	pods, rng := strings.Fields(os.Getenv(podsEnv)), rand.New(rand.NewPCG(1, 1))
	change := func() error {
		hand(a.tracker, pods, 1+rng.IntN(len(pods)), rng)
		for i := range 4 {
			a.tracker.SetService(svc(rng.IntN(8), nodePort(30000+int32(i)), externalIPs(fmt.Sprint("198.18.0.", rng.IntN(200)))))
			a.tracker.SetSlice(slice(i, v1.ProtocolTCP, 1+rng.IntN(9), -1-rng.IntN(9), -20))
			a.tracker.DeleteService(svcName(rng.IntN(8)))
		}
		return a.cursor.Sync(ctx)
	}
	// recovered is what has to hold after each fault, of whatever was asked for
	// during it.
	recovered := func() error {
		if err := a.cursor.Sync(ctx); err != nil {
			return err
		}
		if err := a.backend.Tend(ctx, time.Now()); err != nil {
			return err
		}
		if err := a.backend.Check(ctx); err != nil {
			return err
		}
		s := a.backend.states[0]
		for _, sv := range a.engine.Snapshot().Services {
			if sv.Key.Family != s.family {
				continue
			}
			p := a.backend.config.makePlan(sv, local{node: "node", own: func(netip.Addr) bool { return false }}, 0)
			for _, v := range p.virtuals {
				have := s.virtuals[v.key]
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
				if s.bound[addr].owners == 0 {
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
		{"no file descriptor to spare", func() (func() error, error) {
			release := backendtest.ExhaustFiles()
			return func() error {
				release()
				return nil
			}, nil
		}, 3},
		{"signals all the time", func() (func() error, error) {
			// More often the virtual machine has no time for anything else.
			return backendtest.Signals(30000)
		}, 10},
		{"news of addresses that do not fit", func() (func() error, error) {
			fd := a.backend.device.events
			size, err := unix.GetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_RCVBUF)
			if err != nil {
				return nil, err
			}
			err = unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_RCVBUF, 1)
			return func() error { return unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_RCVBUF, size/2) }, errors.Join(err, fillWithNews())
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
	// Another part of the process closes a socket: the backend reports that, and a new
	// backend takes over.
	for _, protocol := range []int{unix.NETLINK_ROUTE, unix.NETLINK_NETFILTER, unix.NETLINK_GENERIC} {
		sockets, err := netlinkSockets()
		if err != nil {
			return err
		}
		for _, fd := range sockets[protocol] {
			if err := unix.Close(fd); err != nil {
				return err
			}
		}
		a.cursor.Resync()
		if err := change(); !errors.Is(err, os.ErrClosed) {
			return fmt.Errorf("with a closed socket of protocol %d: %w, want os.ErrClosed", protocol, err)
		}
		a.cursor.Detach()
		if err := a.backend.Close(); err != nil {
			return err
		}
		if a.backend, err = New(context.Background(), Config{Families: []tracker.Family{tracker.IPv4}}); err != nil {
			return err
		}
		a.cursor = a.engine.Attach("next", a.backend)
		if err := recovered(); err != nil {
			return fmt.Errorf("after a closed socket of protocol %d: %w", protocol, err)
		}
	}
	return checkSockets()
}

// pausing is a context that calls do whenever its Err is called, as a Backend does
// between the steps of its work.
type pausing struct {
	context.Context
	do func() error
}

func (p pausing) Err() error { return errors.Join(p.Context.Err(), p.do()) }

// fillWithNews makes news of addresses.
func fillWithNews() error {
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

// checkSockets fails unless the process has those netlink sockets that a Backend
// needs, and no more.
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

// testRefused has the kernel refuse single elements among those of many Services:
// everything else is in effect, also of the same Service, and nothing is lost.
func testRefused(f *fire) {
	t := f.t
	ctx := context.Background()
	const services, bad = 30, 7
	handAll := func(n int) {
		for i := range services {
			f.Tracker.SetService(svc(100+i, nodePort(30100+int32(i))))
			f.Tracker.SetSlice(slice(100+i, v1.ProtocolTCP, 1+n, -1-n, -20-n))
		}
	}
	// refused syncs and has one Service fail, for that reason.
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
				t.Errorf("%s: it is %v", what, k)
			}
		}
	}
	expect := func(what string, n int, but ...int) {
		t.Helper()
		found, err := f.eyes.readFamily(tracker.IPv4, time.Now())
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
	f.unharmed(func() {
		handAll(0)
		f.Sync()
		expect("before", 0)

		// A broadcast address, and one that is nowhere, in the middle of a new Service's.
		handAll(1)
		es := slice(100+bad, v1.ProtocolTCP, 2, -2, -21)
		es.Endpoints = slices.Insert(es.Endpoints, 1, discovery.Endpoint{Addresses: []string{"192.0.2.255"}})
		f.Tracker.SetSlice(es)
		f.Tracker.SetService(svc(100+bad, nodePort(30100+bad), externalIPs("198.18.0.7")))
		refused("an endpoint", unix.EINVAL)
		expect("an endpoint", 1)
		if got := f.run("ip -o addr show dev kube-ipvs0"); !strings.Contains(strings.Join(got, "\n"), "198.18.0.7/32") {
			t.Errorf("an address of a Service with an endpoint that is refused is not bound: %v", got)
		}
		if err := f.backend.Check(ctx); err != nil {
			t.Error(err)
		}
		// Time and again nothing else is touched. What was replaced has drained.
		if err := f.backend.Tend(ctx, time.Now().Add(time.Minute)); err != nil {
			t.Error(err)
		}
		before := f.kernel()
		refused("an endpoint, again", unix.EINVAL)
		f.Cursor.Resync()
		refused("an endpoint, in a full delta", unix.EINVAL)
		if err := f.backend.Tend(ctx, time.Now()); err != nil {
			t.Error(err)
		}
		if after := f.kernel(); after != before {
			t.Errorf("an endpoint that is refused once more has changed:\n%s", difference(after, before))
		}
		handAll(1)
		f.Sync()
		expect("an endpoint that is gone", 1)

		// A set without room for another element.
		f.run("ipset create full hash:ip,port maxelem 2; ipset add full 10.96.0.50,tcp:80; ipset add full 10.96.0.51,udp:80; ipset swap full KUBE-EXTERNAL-IP")
		handAll(2)
		f.Tracker.SetService(svc(100+bad, externalIPs("198.18.0.8")))
		err := f.Do(func() error { return f.Cursor.Sync(ctx) })
		var partial *ruleset.PartialError
		if !errors.As(err, &partial) || len(partial.Failed) != 1 {
			t.Errorf("a full set: %v", err)
		}
		expect("a full set", 2, bad)
		f.run("ipset swap full KUBE-EXTERNAL-IP; ipset destroy full")
		f.Cursor.Resync()
		f.Sync()
		expect("a set with room", 2)
	})
	f.adopted()
}

// testAddressesComeAndGo takes an address of the node away and gives it back:
// NodePorts there answer at once, and all others as if nothing were.
func testAddressesComeAndGo(f *fire) {
	t := f.t
	ctx := context.Background()
	there := conformance.Target{Addr: netip.MustParseAddrPort("192.0.2.77:30050"), Protocol: v1.ProtocolTCP}
	tend := func() {
		t.Helper()
		if err := f.backend.Tend(ctx, time.Now()); err != nil {
			t.Error(err)
		}
	}
	f.unharmed(func() {
		for range 3 {
			f.run("ip addr add 192.0.2.77/32 dev lo")
			tend()
			if _, err := f.Reach(there, testtime.Timeout); err != nil {
				t.Error(err)
			}
			f.run("ip addr del 192.0.2.77/32 dev lo")
			tend()
			if server, err := f.Reach(there, time.Second/2); err == nil {
				t.Errorf("%s has answered at an address that is gone", server)
			}
			if got := strings.Join(f.run("ipvsadm -Sn"), "\n"); strings.Contains(got, "-A -t 192.0.2.77:30050") && !strings.Contains(got, "192.0.2.77:30050 -r") {
				t.Errorf("a virtual server without connections is left: %s", got)
			}
			if err := f.backend.Check(ctx); err != nil {
				t.Error(err)
			}
		}
	})
	// The address by which the node is known goes with open connections, and comes back
	// before the clients give up.
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

// testChangingLists reads everything while others change addresses and virtual
// servers, here and in another network namespace, all the time: listings
// that the kernel calls interrupted are read again, what has gone since it was listed is
// none of the backend's, and in the end nothing is amiss.
func testChangingLists(t *testing.T) {
	const services = 60
	r := newRig(t, newHost(t), Config{Families: []tracker.Family{tracker.IPv4}})
	for i := range services {
		r.set(svc(i), i, -1, -2)
	}
	r.sync()
	stop := make(chan struct{})
	var others []chan error
	for _, h := range []*netlab.Host{r.host, newHost(t)} {
		b, err := New(t.Context(), Config{NetNS: h.File(), Families: []tracker.Family{tracker.IPv4}})
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { b.Close() })
		link, err := b.device.route.LinkByName("eth0")
		if err != nil {
			t.Fatal(err)
		}
		b.device.index = link.Attrs().Index
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
				if err := errors.Join(b.kernel.addVirtual(k, virtual{scheduler: RoundRobin}), b.device.bind(a), b.kernel.delVirtual(k), b.device.unbind(a)); err != nil {
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
		// A list of addresses may be interrupted ten times.
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
	t.Logf("%d of 4 syncs have failed", failures)
	r.sync()
	if err := r.backend.Tend(context.Background(), time.Now()); err != nil {
		t.Fatal(err)
	}
	r.agree()
	if err := r.backend.Check(context.Background()); err != nil {
		t.Error(err)
	}
}

// testSysctlsReadOnly has an agent start where kernel parameters cannot be written:
// if they are as they must be that is nothing, and if not it says which one and what
// is there goes on serving.
func testSysctlsReadOnly(f *fire) {
	cmd := f.child("sysctl", confine.Limits{Capabilities: append([]int{unix.CAP_SYS_ADMIN}, needed...)})
	cmd.SysProcAttr = &syscall.SysProcAttr{Unshareflags: syscall.CLONE_NEWNS}
	f.unharmedBy(cmd)
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
	hand(a.tracker, strings.Fields(os.Getenv(podsEnv)), 3, rand.New(rand.NewPCG(1, 1)))
	if err := remount(unix.MS_RDONLY); err != nil {
		return err
	}
	if err := a.cursor.Sync(ctx); err != nil {
		return fmt.Errorf("all are right: %w", err)
	}
	if err := errors.Join(remount(0), os.WriteFile(dir+"/net/ipv4/vs/expire_quiescent_template", []byte("0"), 0), remount(unix.MS_RDONLY)); err != nil {
		return err
	}
	a.cursor.Resync()
	if err := a.cursor.Sync(ctx); !errors.Is(err, syscall.EROFS) || !strings.Contains(err.Error(), "net/ipv4/vs/expire_quiescent_template") {
		return fmt.Errorf("one is wrong and cannot be set: %w", err)
	}
	if err := errors.Join(remount(0), a.cursor.Sync(ctx)); err != nil {
		return fmt.Errorf("it can be set again: %w", err)
	}
	return a.backend.Check(ctx)
}

// testConntrackFull leaves the kernel no room to track another connection: syncs go
// on, open connections live, and new ones come about when there is room.
func testConntrackFull(f *fire) {
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
		if err := os.WriteFile(most, []byte(value), 0); err != nil {
			t.Fatal(err)
		}
	}
	t.Cleanup(func() { set(strings.TrimSpace(string(old))) })
	set("1")
	for _, to := range f.targets {
		if server, err := f.Reach(to, time.Second/2); err == nil {
			t.Errorf("%s has answered although no connection can be tracked", server)
		}
	}
	hand(f.Tracker, f.pods, 2, f.rng)
	f.Sync()
	hand(f.Tracker, f.pods, len(f.pods), f.rng)
	f.Sync()
	f.Cursor.Resync()
	f.Sync()
	if err := f.backend.Check(context.Background()); err != nil {
		t.Error(err)
	}
	if after := f.kernel(); after != before {
		t.Errorf("the kernel has something else than it had:\n%s", difference(after, before))
	}
	if err := held.Check(); err != nil {
		t.Errorf("while no connection can be tracked: %v", err)
	}
	set(strings.TrimSpace(string(old)))
	for _, to := range f.targets {
		if _, err := f.Reach(to, testtime.Timeout); err != nil {
			t.Errorf("there is room again: %v", err)
		}
	}
	if err := held.Check(); err != nil {
		t.Errorf("there is room again: %v", err)
	}
}
