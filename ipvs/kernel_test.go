//go:build linux

package ipvs

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	v1 "k8s.io/api/core/v1"

	"github.com/go-proxier/proxier/internal/backendtest"
	"github.com/go-proxier/proxier/internal/testtime"
	"github.com/go-proxier/proxier/iptables"
	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/ruleset/conformance"
	"github.com/go-proxier/proxier/tracker"
)

// TestKernelFollowsServices runs the tests that need a kernel with IPVS, in one machine.
func TestKernelFollowsServices(t *testing.T) {
	if !inMachine(t) {
		return
	}
	t.Run("source hash replaces missing Maglev", testSourceHashReplacesMissingMaglev)
	for _, c := range []struct {
		name string
		run  func(*testing.T)
	}{
		{"random changes give the model's state", testRandomChanges},
		{"changes take few requests", testChangesTakeFewRequests},
		{"a restart keeps foreign objects", testRestartKeepsForeignObjects},
		{"Cleanup leaves foreign objects", testCleanupLeavesForeignObjects},
		{"only a Backend's rules are owned", testOnlyBackendRulesAreOwned},
		{"drift is detected and repaired", testDriftIsRepaired},
		{"Lookup finds virtual servers", testLookupFindsVirtualServers},
		{"connections are counted", testConnectionsAreCounted},
		{"missing objects cause a full delta", testMissingObjectsCauseAFullDelta},
		{"every scheduler works", testEverySchedulerWorks},
		{"weights select the scheduler", testWeightsSelectTheScheduler},
		{"forwarding methods are set", testForwardingMethodsAreSet},
		{"untranslated packets arrive", testUntranslatedPacketsArrive},
		{"sysctls and timeouts are set", testSysctlsAndTimeoutsAreSet},
		{"IPv4 works with IPv6 disabled", testIPv4WorksWithIPv6Disabled},
		{"NodePorts follow the node's addresses", testNodePortsFollowTheNodesAddresses},
		{"connections outlive their endpoint", testConnectionsOutliveTheirEndpoint},
		{"refused Services fail alone", testRefusedServicesFailAlone},
		{"interrupted deltas are completed", testInterruptedDeltasAreCompleted},
		{"Watch retries refused NodePorts", testWatchRetriesRefusedNodePorts},
		{"UDP answers arrive while draining", testUDPAnswersArriveWhileDraining},
		{"both iptables accept the rules", testBothIptablesAcceptTheRules},
		{"legacy iptables forwards packets", testLegacyIptablesForwardsPackets},
		{"Maglev passes a draining server", testMaglevPassesADrainingServer},
		{"nodes hash alike", testNodesHashAlike},
		{"source hash keeps clients", testSourceHashKeepsClients},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			c.run(t)
		})
	}
}

// testRandomChanges compares the kernel with a model after each of many changes.
func testRandomChanges(t *testing.T) {
	r := newRig(t, newHost(t), Config{})
	rng := rand.New(rand.NewPCG(*backendtest.Seed, 1))
	protocols := []v1.Protocol{v1.ProtocolTCP, v1.ProtocolUDP, v1.ProtocolSCTP}
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
		}
		r.sync()
		if err := r.backend.Tend(context.Background(), time.Now().Add(time.Hour)); err != nil {
			t.Fatal(err)
		}
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
func testChangesTakeFewRequests(t *testing.T) {
	for _, n := range []int{10, 300} {
		r := newRig(t, newHost(t), Config{})
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
func testRestartKeepsForeignObjects(t *testing.T) {
	h := newHost(t)
	r := newRig(t, h, Config{ExcludeCIDRs: []netip.Prefix{netip.MustParsePrefix("10.96.7.0/24")}})
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
	if err := r.backend.Tend(context.Background(), time.Now()); err != nil {
		t.Fatal(err)
	}
	r.hasNot("ipvsadm -Sn", "10.245.0.2:8080 -m -w 0", "10.245.0.7")
	if err := r.backend.Check(context.Background()); err != nil {
		t.Error(err)
	}
}

func withoutComments(lines []string) (out []string) {
	for _, l := range lines {
		if !strings.HasPrefix(l, "#") && !strings.HasPrefix(l, ":") {
			out = append(out, l)
		}
	}
	return out
}

// testCleanupLeavesForeignObjects compares the host before New and after Cleanup.
func testCleanupLeavesForeignObjects(t *testing.T) {
	h := newHost(t)
	state := func() []string {
		out := lines(t, h, "ipvsadm -Sn")
		out = append(out, lines(t, h, "ipset save")...)
		out = append(out, withoutComments(lines(t, h, "iptables-save"))...)
		out = append(out, withoutComments(lines(t, h, "ip6tables-save"))...)
		for _, l := range lines(t, h, "ip -o link") {
			out = append(out, strings.Fields(l)[1])
		}
		return out
	}
	for _, c := range []string{
		"ipvsadm -A -t 203.0.113.9:99 -s lc", "ipvsadm -A -f 77 -s rr", "ipset create mine hash:ip", "ipset add mine 192.0.2.77",
		"iptables -t nat -A POSTROUTING -s 192.0.2.77 -j MASQUERADE", "iptables -t mangle -N KUBE-MARK-MASQ", "ip6tables -A INPUT -p tcp --dport 99 -j DROP",
		"iptables -t nat -A PREROUTING -d 192.0.2.77 -j RETURN", "iptables -t filter -A FORWARD -d 192.0.2.77 -j ACCEPT", "ip6tables -t nat -L", "ip6tables -t mangle -L",
		"iptables -t mangle -A INPUT -d 192.0.2.77 -j ACCEPT",
	} {
		lines(t, h, c)
	}
	before := state()
	if err := Cleanup(context.Background(), Config{NetNS: h.File()}); err != nil {
		t.Errorf("with nothing to remove: %v", err)
	}
	if after := state(); !slices.Equal(before, after) {
		t.Errorf("Cleanup with nothing to remove changed the host:\n%s\nbefore:\n%s", strings.Join(after, "\n"), strings.Join(before, "\n"))
	}
	r := newRig(t, h, Config{})
	r.set(svc(1, nodePort(30001), externalIPs("198.18.0.1", "2001:db8:e::1"), externalLocal), 1, 1, -1)
	r.set(svc(2, over(v1.ProtocolSCTP), nodePort(30002)), 2, 1, -1)
	r.sync()
	if len(state()) < len(before)+40 {
		t.Error("the backend wrote fewer than 40 objects")
	}
	r.backend.Close()
	if err := Cleanup(context.Background(), r.config); err != nil {
		t.Error(err)
	}
	after := state()
	// Empty tables stay.
	r.same("after Cleanup", missing(after, []string{"*nat", "*mangle", "*filter", "COMMIT"}), missing(before, []string{"*nat", "*mangle", "*filter", "COMMIT"}))
	if err := Cleanup(context.Background(), r.config); err != nil {
		t.Errorf("second Cleanup: %v", err)
	}
}

// testDriftIsRepaired alters one object of each kind. Check must report it, and the next full
// delta must repair it.
func testDriftIsRepaired(t *testing.T) {
	r := newRig(t, newHost(t), Config{Families: []tracker.Family{tracker.IPv4}})
	r.set(svc(1, nodePort(30001)), 1, 1, -1)
	var unknown *ruleset.DriftError
	if err := r.backend.Check(context.Background()); !errors.As(err, &unknown) {
		t.Errorf("before the first full delta: %v, want a DriftError", err)
	}
	r.sync()
	tables := []string{"mangle", "nat", "filter"}
	var before [][]string
	for _, t := range tables {
		before = append(before, withoutComments(r.run("iptables-save -t "+t)))
	}
	ctx := context.Background()
	if err := r.backend.Check(ctx); err != nil {
		t.Fatal(err)
	}
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
	} {
		r.run(c)
		err := r.backend.Check(ctx)
		needFull(t, err, c)
		var drift *ruleset.DriftError
		if !errors.As(err, &drift) || drift.What == "" {
			t.Errorf("%s: %v", c, err)
		}
		needFull(t, r.backend.Check(ctx), c+", second Check")
		r.cursor.Resync()
		r.sync()
		if err := r.backend.Tend(ctx, time.Now()); err != nil {
			t.Fatal(err)
		}
		r.agree()
		if err := r.backend.Check(ctx); err != nil {
			t.Errorf("%s: not repaired: %v", c, err)
		}
		for i, t := range tables {
			r.same("table "+t+" after "+c, withoutComments(r.run("iptables-save -t "+t)), before[i])
		}
	}
}

// testMissingObjectsCauseAFullDelta deletes objects that the next delta changes.
func testMissingObjectsCauseAFullDelta(t *testing.T) {
	r := newRig(t, newHost(t), Config{})
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
		if err := r.backend.Tend(context.Background(), time.Now()); err != nil {
			t.Fatal(err)
		}
		r.agree()
	}
}

func testEverySchedulerWorks(t *testing.T) {
	for _, s := range []Scheduler{
		RoundRobin, WeightedRoundRobin, LeastConnection, WeightedLeastConnection, LocalityLeastConnection,
		LocalityLeastConnectionReplication, SourceHash, DestinationHash, ShortestExpectedDelay, NeverQueue, Maglev,
		WeightedFailover, WeightedOverflow,
	} {
		h := newHost(t)
		r := newRig(t, h, Config{Scheduler: s, Families: []tracker.Family{tracker.IPv4}})
		r.set(svc(1), 1, -1)
		r.sync()
		flags := ""
		switch s {
		case SourceHash:
			flags = " -b sh-fallback"
		case Maglev:
			flags = " -b mh-fallback,mh-port"
		}
		r.has("ipvsadm -Sn", fmt.Sprintf("-A -t 10.96.0.1:80 -s %s%s", s, flags))
		r.hasNot("ipvsadm -Sn", "198.51.100.0")
		if s == WeightedOverflow {
			// A new process changes the scheduler.
			r.config.Scheduler = ""
			r.restart()
			r.sync()
			r.has("ipvsadm -Sn", "-A -t 10.96.0.1:80 -s rr")
		}
	}
	testMissingScheduler(t)
	testForeignScheduler(t)
}

// testForeignScheduler uses a scheduler that this package has no name for: the module
// ip_vs_rr under another name.
func testForeignScheduler(t *testing.T) {
	t.Helper()
	const name = "zz"
	module, err := os.ReadFile("/modules/ip_vs_rr.ko")
	if err != nil {
		t.Log("needs the virtual machine: the test adds a kernel module")
		return
	}
	h := newHost(t)
	c := Config{NetNS: h.File(), Scheduler: name, Families: []tracker.Family{tracker.IPv4}}
	if err := Probe(t.Context(), c); !errors.Is(err, ruleset.ErrUnsupported) || !strings.Contains(err.Error(), "scheduler zz (module ip_vs_zz) for IPv4 is not supported") {
		t.Errorf("without its module: %v", err)
	}
	// Replace the names of the module and of the scheduler. Neither is part of a longer string.
	for old, now := range map[string]string{"ip_vs_rr\x00": "ip_vs_" + name + "\x00", "\x00rr\x00": "\x00" + name + "\x00"} {
		if !bytes.Contains(module, []byte(old)) {
			t.Fatalf("the module has no %q", old)
		}
		module = bytes.ReplaceAll(module, []byte(old), []byte(now))
	}
	// The kernel rejects a module with a wrong signature, but not one without any
	// (Documentation/admin-guide/module-signing.rst).
	module = bytes.TrimSuffix(module, []byte("~Module signature appended~\n"))
	file := filepath.Join(t.TempDir(), "ip_vs_"+name+".ko")
	if err := os.WriteFile(file, module, 0o644); err != nil {
		t.Fatal(err)
	}
	if out, err := exec.Command("insmod", file).CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	r := newRig(t, h, c)
	r.set(svc(1), 1, -1)
	r.sync()
	r.has("ipvsadm -Sn", "-A -t 10.96.0.1:80 -s "+name)
}

// testMissingScheduler removes the module of a scheduler that no other test uses.
func testMissingScheduler(t *testing.T) {
	t.Helper()
	if out, err := exec.Command("rmmod", "ip_vs_ovf").CombinedOutput(); err != nil {
		t.Logf("cannot remove a module: %v: %s", err, out)
		return
	}
	h := newHost(t)
	err := Probe(t.Context(), Config{NetNS: h.File(), Scheduler: WeightedOverflow})
	var unsupported *ruleset.UnsupportedError
	if !errors.Is(err, ruleset.ErrUnsupported) || !errors.As(err, &unsupported) || !strings.Contains(err.Error(), "module ip_vs_ovf") {
		t.Errorf("%v", err)
	}
	if err := Probe(t.Context(), Config{NetNS: h.File(), Scheduler: RoundRobin}); err != nil {
		t.Error(err)
	}
	if got := lines(t, h, "ipvsadm -Sn"); len(got) != 0 {
		t.Errorf("Probe left %q", got)
	}
}

func testWeightsSelectTheScheduler(t *testing.T) {
	r := newRig(t, newHost(t), Config{})
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

func testForwardingMethodsAreSet(t *testing.T) {
	for f, flag := range map[Forwarding]string{NAT: "-m", DirectRouting: "-g", Tunnel: "-i"} {
		r := newRig(t, newHost(t), Config{Forwarding: f, Families: []tracker.Family{tracker.IPv4}})
		r.set(svc(1), 1, -1)
		r.sync()
		found := false
		for _, l := range r.run("ipvsadm -Sn") {
			found = found || strings.HasPrefix(l, "-a -t 10.96.0.1:80 -r 10.245.0.1:") && strings.Contains(l, " "+flag+" -w 1")
		}
		if !found {
			t.Errorf("%s: %q", f, r.run("ipvsadm -Sn"))
		}
	}
}

func testSysctlsAndTimeoutsAreSet(t *testing.T) {
	h := newHost(t)
	parameter := func(name string) string {
		return strings.Join(lines(t, h, "cat /proc/sys/"+name), " ")
	}
	c := Config{NetNS: h.File(), StrictARP: true, Timeouts: Timeouts{TCP: 100 * time.Second, UDP: 30 * time.Second}}
	lines(t, h, "ipvsadm --set 900 120 300")
	r := newRig(t, h, c)
	if parameter("net/ipv4/vs/conntrack") != "0" {
		t.Error("New set a kernel parameter")
	}
	r.sync()
	for _, s := range parametersOf(t, c) {
		if got := parameter(s.name); got != s.value {
			t.Errorf("%s is %s, want %s", s.name, got, s.value)
		}
	}
	if got := parameter("net/ipv6/conf/all/forwarding"); got != "0" {
		t.Errorf("IPv6 forwarding is %s, want 0: the node would lose routes from router advertisements", got)
	}
	r.has("ipvsadm -l --timeout", "Timeout (tcp tcpfin udp): 100 120 30")
	// The next full delta repairs a parameter that another program changed.
	lines(t, h, "sysctl -w net.ipv4.vs.conntrack=0")
	r.cursor.Resync()
	r.sync()
	if parameter("net/ipv4/vs/conntrack") != "1" {
		t.Error("a kernel parameter was not repaired")
	}
	early := newHost(t)
	c.NetNS = early.File()
	if err := SetSysctls(c); err != nil {
		t.Error(err)
	}
	for _, s := range parametersOf(t, c) {
		if got := strings.Join(lines(t, early, "cat /proc/sys/"+s.name), " "); got != s.value {
			t.Errorf("SetSysctls: %s is %s, want %s", s.name, got, s.value)
		}
	}
	kept := newHost(t)
	r = newRig(t, kept, Config{KeepSysctls: true})
	r.sync()
	if got := lines(t, kept, "cat /proc/sys/net/ipv4/vs/conntrack"); !slices.Equal(got, []string{"0"}) {
		t.Errorf("conntrack is %q with KeepSysctls, want 0", got)
	}
}

// testIPv4WorksWithIPv6Disabled disables IPv6 before New, and while a backend serves both
// families.
func testIPv4WorksWithIPv6Disabled(t *testing.T) {
	h := newHost(t)
	if err := h.Sysctl("net/ipv6/conf/all/disable_ipv6", "1"); err != nil {
		t.Fatal(err)
	}
	for _, families := range [][]tracker.Family{nil, {tracker.IPv6}} {
		if err := Probe(t.Context(), Config{NetNS: h.File(), Families: families}); !errors.Is(err, ruleset.ErrUnsupported) || !strings.Contains(err.Error(), "net.ipv6.conf.all.disable_ipv6 is 1") {
			t.Errorf("families %v: %v", families, err)
		}
	}
	r := newRig(t, h, Config{Families: []tracker.Family{tracker.IPv4}})
	r.set(svc(1), 1, -1)
	r.sync()
	r.agree()
	// Cleanup of both families works.
	if err := Cleanup(context.Background(), Config{NetNS: h.File()}); err != nil {
		t.Error(err)
	}
	// A backend that served IPv6 before still serves IPv4.
	later := newHost(t)
	r = newRig(t, later, Config{})
	r.set(svc(1), 1, -1)
	r.sync()
	if err := later.Sysctl("net/ipv6/conf/all/disable_ipv6", "1"); err != nil {
		t.Fatal(err)
	}
	r.set(svc(2), 2, -2)
	r.cursor.Resync()
	var partial *ruleset.PartialError
	if err := r.cursor.Sync(context.Background()); !errors.As(err, &partial) || len(partial.Failed) != 2 {
		t.Errorf("%v, want a PartialError for two IPv6 Services", err)
	} else {
		for k := range partial.Failed {
			if k.Family != tracker.IPv6 {
				t.Errorf("%v failed", k)
			}
		}
	}
	r.has("ipvsadm -Sn", "-a -t 10.96.0.2:80 -r 10.245.0.2:8080 -m -w 1")
}

// testNodePortsFollowTheNodesAddresses adds and deletes addresses of the node.
func testNodePortsFollowTheNodesAddresses(t *testing.T) {
	r := newRig(t, newHost(t), Config{})
	r.set(svc(1, nodePort(30001), externalIPs("198.18.0.7")), 1, -1)
	r.set(svc(2), 2, -1)
	r.sync()
	r.agree()
	tend := func() {
		t.Helper()
		if err := r.backend.Tend(context.Background(), time.Now()); err != nil {
			t.Fatal(err)
		}
	}
	before := r.calls()
	tend()
	if got := r.calls() - before; got != 0 {
		t.Errorf("Tend made %d requests without a change, want 0", got)
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
	if err := r.backend.Check(context.Background()); err != nil {
		t.Error(err)
	}
}

// testConnectionsOutliveTheirEndpoint uses a connection after its endpoint was removed and after
// its Service was deleted.
func testConnectionsOutliveTheirEndpoint(t *testing.T) {
	h := newHost(t)
	r := newRig(t, h, Config{Families: []tracker.Family{tracker.IPv4}})
	// The endpoints are the node's own addresses.
	for _, a := range []string{"10.244.1.1/32", "10.244.1.2/32"} {
		if err := h.AddAddr("eth0", netip.MustParsePrefix(a)); err != nil {
			t.Fatal(err)
		}
		h.ServeTCP(t, strings.TrimSuffix(a, "/32")+":8080", func(c net.Conn) {
			fmt.Fprintln(c, c.LocalAddr())
			_, _ = io.Copy(c, c)
		})
	}
	tend := func(after time.Duration) {
		t.Helper()
		if err := r.backend.Tend(context.Background(), time.Now().Add(after)); err != nil {
			t.Fatal(err)
		}
	}
	type conn struct {
		io.ReadWriteCloser
		lines  *bufio.Reader
		server string
	}
	dial := func(wait time.Duration) (*conn, error) {
		ctx, cancel := context.WithTimeout(context.Background(), wait)
		defer cancel()
		c, err := h.Dial(ctx, "tcp", "192.0.2.1:0", "10.96.0.1:80")
		if err != nil {
			return nil, err
		}
		lines := bufio.NewReader(c)
		server, err := lines.ReadString('\n')
		return &conn{c, lines, strings.TrimSpace(server)}, err
	}
	echo := func(c *conn) error {
		if _, err := fmt.Fprintln(c, "hello"); err != nil {
			return err
		}
		got, err := c.lines.ReadString('\n')
		if err == nil && got != "hello\n" {
			err = fmt.Errorf("got %q", got)
		}
		return err
	}
	r.set(svc(1), 1, 1)
	r.sync()
	first, err := dial(testtime.Timeout)
	if err != nil {
		t.Fatal(err)
	}
	// Replace its endpoint.
	r.set(svc(1), 1, 2)
	r.sync()
	tend(time.Hour)
	r.has("ipvsadm -Sn", "-a -t 10.96.0.1:80 -r 10.244.1.1:8080 -m -w 0", "-a -t 10.96.0.1:80 -r 10.244.1.2:8080 -m -w 1")
	if err := echo(first); err != nil {
		t.Errorf("the connection was lost with its endpoint: %v", err)
	}
	for range 4 {
		c, err := dial(testtime.Timeout)
		if err != nil {
			t.Fatal(err)
		}
		if c.server != "10.244.1.2:8080" {
			t.Errorf("the draining %s gets new connections", c.server)
		}
		c.Close()
	}
	// Add the endpoint again, remove it, and restart.
	r.set(svc(1), 1, 1, 2)
	r.sync()
	r.has("ipvsadm -Sn", "-a -t 10.96.0.1:80 -r 10.244.1.1:8080 -m -w 1")
	r.set(svc(1), 1, 2)
	r.sync()
	r.restart()
	r.sync()
	tend(time.Hour)
	if err := echo(first); err != nil {
		t.Errorf("the connection was lost in a restart: %v", err)
	}
	// Delete the Service.
	r.remove(1)
	r.sync()
	tend(time.Hour)
	if err := echo(first); err != nil {
		t.Errorf("the connection was lost with its Service: %v", err)
	}
	if c, err := dial(2 * time.Second); err == nil {
		t.Errorf("%s answered for a deleted Service", c.server)
	}
	if err := r.backend.Check(context.Background()); err != nil {
		t.Error(err)
	}
	r.restart()
	r.sync()
	if err := echo(first); err != nil {
		t.Errorf("the connection was lost in a restart after its Service was deleted: %v", err)
	}
	// Create the Service again.
	r.set(svc(1), 1, 1, 2)
	r.sync()
	r.agree()
	if err := echo(first); err != nil {
		t.Errorf("the connection was lost when its Service was created again: %v", err)
	}
	r.hasNot("ipset save", "NO-LOCAL-ENDPOINTS 10")
	// A limit ends the connection.
	r.remove(1)
	r.sync()
	r.backend.config.Drain.Limit = time.Minute
	tend(time.Minute / 2)
	r.has("ipvsadm -Sn", "-A -t 10.96.0.1:80 -s rr")
	tend(time.Hour)
	if got := r.run("ipvsadm -Sn"); len(got) != 0 {
		t.Errorf("after the limit: %q", got)
	}
	r.hasNot("ipset save", "add ")
	r.hasNot("ip -o addr show dev kube-ipvs0", "10.96")
}

// testRefusedServicesFailAlone makes the kernel refuse single Services.
func testRefusedServicesFailAlone(t *testing.T) {
	h := newHost(t)
	r := newRig(t, h, Config{Families: []tracker.Family{tracker.IPv4}})
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
	// The context is cancelled, or the backend closed.
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	if err := r.backend.Apply(ctx, &ruleset.Delta{}); !errors.Is(err, context.Canceled) {
		t.Errorf("cancelled: %v", err)
	}
	r.backend.Close()
	if err := r.backend.Check(context.Background()); !errors.Is(err, os.ErrClosed) {
		t.Errorf("closed: %v", err)
	}
	// A device of another type has the name.
	r.run("ip link add br0 type bridge")
	r.config.Device = "br0"
	r.restart()
	if err := r.cursor.Sync(context.Background()); err == nil || !strings.Contains(err.Error(), "bridge") {
		t.Errorf("device: %v", err)
	}
}

// testBothIptablesAcceptTheRules restores the golden rules twice with both variants of iptables.
func testBothIptablesAcceptTheRules(t *testing.T) {
	for _, variant := range []iptables.Flavour{iptables.NFT, iptables.Legacy} {
		for name, g := range goldenRules() {
			h := newHost(t)
			tool, err := findTool(t.Context(), Config{IPTables: variant}, g.family, h.Namespace())
			if err != nil {
				t.Fatal(err)
			}
			golden, err := os.ReadFile("testdata/" + name)
			if err != nil {
				t.Fatal(err)
			}
			err = h.Do(func() error {
				b := &Backend{}
				if b.sets, err = dialIPSets(); err != nil {
					return err
				}
				defer b.close()
				for id := range setCount {
					if err := b.sets.create(id, g.family); err != nil {
						return err
					}
				}
				ctx := context.Background()
				if err := tool.Restore(ctx, golden); err != nil {
					return err
				}
				first, err := saved(ctx, tool)
				if err != nil {
					return err
				}
				if err := tool.Restore(ctx, []byte(restoreAll(g.tables(), first))); err != nil {
					return err
				}
				second, err := saved(ctx, tool)
				if err != nil {
					return err
				}
				own := ownRules(g.tables(), first)
				if again := ownRules(g.tables(), second); own != again {
					return fmt.Errorf("after the second restore:\n%s\nafter the first:\n%s", again, own)
				}
				rules := strings.Count(string(golden), "\n-A ") + strings.Count(string(golden), "\n-I ")
				if got := strings.Count(own, "\n-A "); got != rules {
					return fmt.Errorf("%d rules, want %d:\n%s", got, rules, own)
				}
				if err := tool.Restore(ctx, []byte(removeAll(g.tables(), second))); err != nil {
					return err
				}
				third, err := saved(ctx, tool)
				if err == nil && strings.Contains(third, "KUBE") {
					err = fmt.Errorf("after the removal:\n%s", third)
				}
				return err
			})
			if err != nil {
				t.Errorf("nft %v, %s: %v", tool.NFT(), name, err)
			}
		}
	}
}

func testLegacyIptablesForwardsPackets(t *testing.T) {
	w := conformance.NewWorld(t, conformance.Options{New: func(tb testing.TB, env conformance.Env) ruleset.Backend {
		b, err := New(tb.Context(), Config{NetNS: env.NetNS, Families: env.Families, IPTables: iptables.Legacy})
		if err != nil {
			tb.Fatal(err)
		}
		tb.Cleanup(func() { b.Close() })
		return b
	}})
	churn(t, w, func() {
		w.Cursor.Resync()
		w.Sync()
	})
}

// testMaglevPassesADrainingServer connects with Maglev while servers drain.
func testMaglevPassesADrainingServer(t *testing.T) {
	w := conformance.NewWorld(t, conformance.Options{New: func(tb testing.TB, env conformance.Env) ruleset.Backend {
		b, err := New(tb.Context(), Config{NetNS: env.NetNS, Families: env.Families, Scheduler: Maglev})
		if err != nil {
			tb.Fatal(err)
		}
		tb.Cleanup(func() { b.Close() })
		return b
	}})
	pods := w.Pods()
	churn(t, w, func() {
		for i := range 10 {
			ep := slice(1, v1.ProtocolTCP)
			for _, p := range pods[i%3 : i%3+2] {
				s := slice(1, v1.ProtocolTCP, 1).Endpoints[0]
				s.Addresses = []string{p.Addr(tracker.IPv4).String()}
				s.NodeName = &p.Node
				ep.Endpoints = append(ep.Endpoints, s)
			}
			w.Tracker.SetSlice(ep)
			w.Sync()
			time.Sleep(50 * time.Millisecond)
		}
	})
}

// churn connects to a Service with the first pods as endpoints while f runs.
func churn(t *testing.T, w *conformance.World, f func()) {
	t.Helper()
	ep := slice(1, v1.ProtocolTCP, 1, 2)
	for i := range ep.Endpoints {
		p := w.Pods()[i]
		ep.Endpoints[i].Addresses, ep.Endpoints[i].NodeName = []string{p.Addr(tracker.IPv4).String()}, &p.Node
	}
	w.Tracker.SetService(svc(1))
	w.Tracker.SetSlice(ep)
	w.Sync()
	c := w.Churn([]conformance.Target{{Addr: netip.MustParseAddrPort("10.96.0.1:80"), Protocol: v1.ProtocolTCP}}, f)
	if c.Opened < 4 {
		t.Errorf("only %d connections", c.Opened)
	}
	for _, err := range c.Failures {
		t.Error(err)
	}
}

// parametersOf returns the kernel parameters that SetSysctls sets.
func parametersOf(t *testing.T, c Config) []parameter {
	t.Helper()
	c, err := c.withDefaults()
	if err != nil {
		t.Fatal(err)
	}
	return c.parameters(release())
}
