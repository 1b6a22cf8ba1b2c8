//go:build linux

package wholeagent

import (
	"fmt"
	"net"
	"os"
	"os/exec"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/go-proxier/proxier/examples/internal/node/modes"
	"github.com/go-proxier/proxier/examples/nodeproxy/internal/lab"
	"github.com/go-proxier/proxier/internal/testing/must"
	"github.com/go-proxier/proxier/internal/testing/netlab"
	"github.com/go-proxier/proxier/internal/testing/stall"
	"github.com/go-proxier/proxier/internal/testing/testtime"
	"github.com/go-proxier/proxier/internal/testing/vm"
)

// traces lists the state that a node has for Services in iptables, ipset, IPVS and devices:
// chains and rules without counters, names of sets, virtual servers and addresses.
func traces(t *testing.T, h *netlab.Host) []string {
	t.Helper()
	var out []string
	add := func(keep func(string) (string, bool), name string, args ...string) {
		t.Helper()
		var text string
		// A listing may fail because of a concurrent removal.
		eventually(t, name, func() bool {
			var err error
			text, err = h.Run(t, name, args...)
			return err == nil
		})
		for line := range strings.Lines(text) {
			if line, ok := keep(strings.TrimSpace(line)); ok {
				out = append(out, name+": "+line)
			}
		}
	}
	for _, save := range []string{"iptables-save", "ip6tables-save"} {
		table := ""
		add(func(l string) (string, bool) {
			if strings.HasPrefix(l, "*") {
				table = l
			}
			l, _, _ = strings.Cut(l, " [")
			return table + " " + l, strings.Contains(l, "KUBE-") && !strings.Contains(l, "KUBE-PROXY-CANARY")
		}, save)
	}
	every := func(l string) (string, bool) { return l, l != "" }
	add(every, "ipset", "list", "-name")
	add(func(l string) (string, bool) {
		return l, strings.HasPrefix(l, "-A ") || strings.HasPrefix(l, "-a ")
	}, "ipvsadm", "-Sn")
	add(func(l string) (string, bool) {
		f := strings.Fields(l)
		return strings.Join(f[:min(len(f), 4)], " "), strings.Contains(l, "kube-ipvs0")
	}, "ip", "-o", "addr")
	slices.Sort(out)
	return out
}

// takeOverIPVS takes a node over from kube-proxy's ipvs mode, which runs or has ended.
func takeOverIPVS(t *testing.T) {
	for _, to := range []string{"nftables", "iptables", "ipvs"} {
		for _, seen := range []string{"default ports", "ended"} {
			t.Run("to="+to+"/"+seen, func(t *testing.T) { takeOver(t, "ipvs", to, seen) })
		}
	}
}

// reset closes a connection by a reset, so that IPVS expires it after ten seconds instead of
// two minutes.
func reset(c *lab.Talk) {
	if tcp, ok := c.Conn.(*net.TCPConn); ok {
		_ = tcp.SetLinger(0) // if this fails, the test only takes longer
	}
	c.Close()
}

// visitBriefly is visit with a reset at the end, and a pause that leaves an emulated machine
// time for other work.
func visitBriefly(h *netlab.Host, from, to string) (name, source string, err error) {
	defer time.Sleep(50 * time.Millisecond)
	c, err := lab.Dial(h, "tcp", from, to, 2*testtime.Timeout)
	if err != nil {
		return "", "", err
	}
	defer reset(c)
	return c.Hear()
}

// briefStream opens connections to the Service web that IPVS forgets soon. It excuses the few that
// fail while the emulated machine stands still, and reports their number.
func briefStream(t *testing.T, s *site) *lab.Stream {
	t.Helper()
	stalls := stall.Start()
	var excused atomic.Int32
	t.Cleanup(func() {
		stalls.Stop()
		n, total := stalls.Stalls()
		t.Logf("%d failed connections were excused; the machine stood still %d times, for %v", excused.Load(), n, total)
		if excused.Load() > 2 {
			t.Errorf("%d connections failed while the machine stood still, which is too many to excuse", excused.Load())
		}
	})
	visit := func(h *netlab.Host, from, to string) (name, source string, err error) {
		begin := time.Now()
		if name, source, err = visitBriefly(h, from, to); err != nil && stalls.Since(begin) {
			excused.Add(1)
			return visitBriefly(h, from, to)
		}
		return name, source, err
	}
	return lab.StartStream(&lab.Stream{Visit: visit}, s.Client, clusterVIP, s.Client, nodePort)
}

// difference returns the lines that only one of two sorted lists has.
func difference(got, want []string) string {
	var b strings.Builder
	for _, l := range got {
		if !slices.Contains(want, l) {
			fmt.Fprintln(&b, "+", l)
		}
	}
	for _, l := range want {
		if !slices.Contains(got, l) {
			fmt.Fprintln(&b, "-", l)
		}
	}
	return b.String()
}

// cleanupIPVSNode checks that --cleanup removes the state of kube-proxy's ipvs mode.
func cleanupIPVSNode(t *testing.T) {
	s := newSite(t)
	startKubeProxy(t, s.Node, "ipvs", false, podIPs[0])
	if len(traces(t, s.Node)) < 40 {
		t.Fatalf("the state of the test is incomplete: %q", traces(t, s.Node))
	}
	if code, _, log := verb(t, s.Node, "run", "--cleanup", "--adopt-from-kube-proxy"); code != 0 {
		t.Errorf("exit status %d, log:\n%s", code, log)
	}
	if left := traces(t, s.Node); len(left) != 0 {
		t.Errorf("left:\n%s", strings.Join(left, "\n"))
	}
}

// TestIPVSNode runs the tests that need a kernel with IPVS.
func TestIPVSNode(t *testing.T) {
	testtime.NeedComplete(t)
	t.Parallel()
	netlab.NeedPrograms(t, "ipset", "ipvsadm")
	if !vm.Inside(t, vm.IPVS) {
		return
	}
	t.Run("privileges", privilegesIPVS)
	t.Run("explain", explainIPVS)
	t.Run("trace and top", traceIPVS)
	t.Run("cleanup", cleanupIPVSNode)
	t.Run("init-only", func(t *testing.T) { testInitOnly(t, "ipvs") })
	t.Run("disabled IPv6", func(t *testing.T) { testDisabledIPv6(t, "ipvs") })
	t.Run("leave with disabled IPv6", leaveIPVSWithoutIPv6)
	t.Run("IPv6 forwarding", ipv6ForwardingIPVS)
	t.Run("scheduler", schedulerIPVS)
	t.Run("take over", takeOverIPVS)
	t.Run("leave", func(t *testing.T) { giveBack(t, "nftables", "ipvs") })
	t.Run("switch to", func(t *testing.T) { switchModes(t, "iptables", "ipvs", "nftables", "ipvs") })
	t.Run("switch from", func(t *testing.T) { switchModes(t, "ipvs", "iptables", "nftables") })
	t.Run("localhost", func(t *testing.T) { testLocalhost(t, "ipvs") })
	t.Run("metrics", func(t *testing.T) { metricsOf(t, modes.IPVS()) })
	t.Run("flavor", func(t *testing.T) { testFlavor(t, "ipvs") })
}

// leaveIPVSWithoutIPv6 changes to another mode on a node where IPv6 is turned off.
func leaveIPVSWithoutIPv6(t *testing.T) {
	s := newSite(t)
	must.Do(t, s.Node.Sysctl("net/ipv6/conf/all/disable_ipv6", "1"))
	dir := t.TempDir()
	rollOut(t, dir, podIPs[0])
	for _, mode := range []string{"ipvs", "nftables"} {
		p := start(t, s.Node, "run", "--manifests", dir, "--hostname-override", "n1", "--proxy-mode", mode)
		p.synced(t, "services=1 endpoints=1 changed=1")
		if mode == "nftables" {
			eventually(t, "nothing is left of mode ipvs", func() bool { return len(traces(t, s.Node)) == 0 })
		} else if len(traces(t, s.Node)) == 0 {
			t.Error("mode ipvs has no rules")
		}
		p.kill(t)
	}
}

// ipv6ForwardingIPVS checks that the agent does not enable IPv6 forwarding, which would remove
// routes from router advertisements, and that it logs a warning.
func ipv6ForwardingIPVS(t *testing.T) {
	s := newSite(t)
	for _, name := range []string{"net/ipv4/ip_forward", "net/ipv6/conf/all/forwarding"} {
		must.Do(t, s.Node.Sysctl(name, "0"))
	}
	p := s.serveWeb(t, podIPs[:1], "--proxy-mode", "ipvs")
	s.answeredBy(t, clusterVIP, podIPs[0])
	if got := sysctl(t, s.Node, "net/ipv6/conf/all/forwarding"); got != "0" {
		t.Errorf("IPv6 forwarding is %s", got)
	}
	if log := p.log(); !strings.Contains(log, "does not forward packets") || !strings.Contains(log, `sysctl="net/ipv6/conf/all/forwarding"`) ||
		strings.Contains(log, `sysctl="net/ipv4/ip_forward"`) {
		t.Errorf("log:\n%s", log)
	}
}

// schedulerIPVS configures a scheduler that keeps a client with an endpoint, and one that the
// kernel does not have.
func schedulerIPVS(t *testing.T) {
	s, dir := webSite(t, podIPs...)
	args := []string{"run", "--manifests", dir, "--hostname-override", "n1", "--proxy-mode", "ipvs", "--ipvs-scheduler"}
	p := start(t, s.Node, append(args, "twos")...)
	if code, out := p.exit(t); code != 1 || len(out) != 0 || !strings.Contains(p.log(), "ip_vs_twos") {
		t.Errorf("scheduler twos: exit status %d, %q, log:\n%s", code, out, p.log())
	}
	p = start(t, s.Node, append(args, "sh")...)
	p.synced(t, "services=1 endpoints=3 changed=1")
	if y := lab.Visits(s.Client, "", clusterVIP, 60); len(y.Errs) != 0 || len(y.Answers) != 1 {
		t.Errorf("a client of scheduler sh is answered by %v", y)
	}
}

// explainIPVS checks explain's comparison with IPVS.
func explainIPVS(t *testing.T) {
	s := newSite(t)
	dir := t.TempDir()
	local := strings.Replace(webService, "spec:\n", "spec:\n  externalTrafficPolicy: Local\n", 1)
	node := "apiVersion: v1\nkind: Node\nmetadata: {name: n1}\nstatus: {addresses: [{type: InternalIP, address: 192.0.2.1}]}\n---\n"
	here := strings.Replace(webSlice(podIPs[:2]...), "- addresses: [10.1.0.2]\n", "- addresses: [10.1.0.2]\n  nodeName: n1\n", 1)
	put(t, dir, "web.yaml", node+local+"---\n"+here)
	asks := func(code int, from, to string, want ...string) {
		t.Helper()
		got, out, log := verb(t, s.Node, "explain", "--manifests", dir, "--hostname-override", "n1", "--proxy-mode", "ipvs", "--from", from, to)
		for _, line := range want {
			if got != code || !slices.ContainsFunc(out, func(l string) bool { return strings.HasPrefix(l, "kernel: "+line) }) {
				t.Errorf("from %s to %s: exit status %d, want %d; %q in\n%s\n%s", from, to, got, code, line, strings.Join(out, "\n"), log)
			}
		}
		// The output must have no other endpoints.
		if got, n := strings.Count(strings.Join(out, "\n"), "kernel: endpoint "), strings.Count(strings.Join(want, "\n"), "endpoint "); got != n {
			t.Errorf("from %s to %s: %d endpoints, want %d, in\n%s", from, to, got, n, strings.Join(out, "\n"))
		}
	}
	const client, own = "192.0.2.9", "192.0.2.1"
	asks(1, client, clusterVIP, "mode ipvs has no rules in this network namespace")
	p := start(t, s.Node, "run", "--manifests", dir, "--hostname-override", "n1", "--min-sync-period", "0s", "--proxy-mode", "ipvs")
	p.synced(t, "services=1 endpoints=2 changed=1")
	asks(0, client, clusterVIP, "endpoint 10.1.0.2:8080", "endpoint 10.1.0.3:8080", "agrees")
	asks(0, client, nodePort, "endpoint 10.1.0.2:8080", "agrees")
	// The node itself may use all endpoints, by another virtual server.
	asks(0, own, nodePort, "endpoint 10.1.0.2:8080", "endpoint 10.1.0.3:8080", "agrees")
	asks(0, client, "10.96.0.10:81", "no virtual server for it", "agrees")
	p.kill(t)
	must.Get(s.Node.Run(t, "ipvsadm", "-e", "-t", clusterVIP, "-r", "10.1.0.3:8080", "-m", "-w", "0"))(t)
	asks(1, client, clusterVIP, "endpoint 10.1.0.2:8080", "DIFFERS from what the objects require")
	must.Get(s.Node.Run(t, "ip", "addr", "del", "10.96.0.10/32", "dev", "kube-ipvs0"))(t)
	asks(1, client, clusterVIP, "virtual server TCP 10.96.0.10:80 exists, but 10.96.0.10 is bound to no device", "DIFFERS from what the objects require")
}

// traceIPVS follows and counts connections through IPVS. The kernel has no names of Services, so
// top shows addresses.
func traceIPVS(t *testing.T) {
	s := newSite(t)
	s.traceAgrees(t, "ipvs", nil)
	count := func() float64 {
		n, _ := topRows(t, s.Node, "--proxy-mode", "ipvs")["10.96.0.10:80 IPv4"]["connections"].(float64)
		return n
	}
	// The kernel adds new connections to the counters every two seconds
	// (estimation_timer in net/netfilter/ipvs/ip_vs_est.c).
	before := count()
	for end := time.Now().Add(testtime.Timeout); time.Now().Before(end); {
		time.Sleep(3 * time.Second)
		last := before
		if before = count(); before == last {
			break
		}
	}
	const more = 7
	if y := lab.Visits(s.Client, "", clusterVIP, more); len(y.Errs) != 0 {
		t.Fatal(y.Errs[0])
	}
	eventually(t, "top counts each connection", func() bool { return count() >= before+more })
	if got := count() - before; got != more {
		t.Errorf("top counted %v connections, want %d", got, more)
	}
}

// modprobe replaces modprobe(8). It loads all missing modules of the machine.
const modprobe = `#!/bin/sh
while read -r m; do insmod /modules/$m 2>/dev/null; done </modules/order
exit 0
`

// privilegesIPVS starts the agent with every capability, in the machine's own network
// namespace, where the modules of iptables-legacy are not loaded. Only a privileged process
// can load them.
func privilegesIPVS(t *testing.T) {
	dir := t.TempDir()
	out, err := exec.Command("sh", "-c", "rmmod iptable_nat iptable_filter iptable_mangle iptable_raw iptable_security ip_tables ip6table_nat ip6table_filter ip6table_mangle ip6table_raw ip6table_security ip6_tables 2>&1; ls /proc/net/ip_tables_names /proc/net/ip6_tables_names").CombinedOutput()
	if err == nil {
		t.Skipf("the modules of iptables-legacy cannot be unloaded: %s", out)
	}
	put(t, dir, "modprobe", modprobe)
	must.Do(t, os.Chmod(dir+"/modprobe", 0o755))
	before := must.Get(os.ReadFile("/proc/sys/kernel/modprobe"))(t)
	must.Do(t, os.WriteFile("/proc/sys/kernel/modprobe", []byte(dir+"/modprobe"), 0))
	defer os.WriteFile("/proc/sys/kernel/modprobe", before, 0)
	s := newSite(t)
	rollOut(t, dir, podIPs[0])
	p := startWith(t, s.Node, []string{"PATH=" + flavorPath(t, "legacy")}, "run", "--manifests", dir, "--hostname-override", "n1", "--proxy-mode", "ipvs")
	p.synced(t, "services=1 endpoints=1 changed=1")
	p.onlyNeededCapabilities(t)
	s.answeredBy(t, clusterVIP, podIPs[0])
	for _, note := range []string{"kube-proxy has deprecated its mode ipvs", "removes it in Kubernetes 1.43 (KEP-5495)", "nodeproxy keeps its mode ipvs"} {
		p.logged(t, note)
	}

	// As with kube-proxy, the limit of connections is only raised.
	const limit = "/proc/sys/net/netfilter/nf_conntrack_max"
	if before, err = os.ReadFile(limit); err != nil {
		t.Fatal(err)
	}
	defer os.WriteFile(limit, before, 0)
	for _, tt := range []struct{ perCore, was, want string }{{"0", "77777", "77777\n"}, {"1", "77777", "200000\n"}, {"1", "777777", "777777\n"}} {
		must.Do(t, os.WriteFile(limit, []byte(tt.was), 0))
		cmd := exec.Command("/proc/self/exe", "run", "--init-only", "--conntrack-max-per-core", tt.perCore, "--conntrack-min", "200000")
		cmd.Env = append(os.Environ(), programEnv+"=1")
		if out, err := cmd.CombinedOutput(); err != nil {
			t.Errorf("--init-only: %v\n%s", err, out)
		}
		if got, err := os.ReadFile(limit); err != nil || string(got) != tt.want {
			t.Errorf("--conntrack-max-per-core %s: the limit was %s and is %s, want %s, error %v", tt.perCore, tt.was, got, tt.want, err)
		}
	}
}
