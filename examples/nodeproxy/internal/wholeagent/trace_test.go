//go:build linux

package wholeagent

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/go-proxier/proxier/examples/nodeproxy/internal/lab"
	"github.com/go-proxier/proxier/internal/testing/must"
	"github.com/go-proxier/proxier/internal/testing/netlab"
	"github.com/go-proxier/proxier/internal/testing/testtime"
)

// runTrace runs trace while connect makes connections, until trace ends.
func runTrace(t *testing.T, h *netlab.Host, connect func(), args ...string) (code int, out string) {
	t.Helper()
	p := embed(t, h, append([]string{"trace", "--for", "5m"}, args...)...)
	first := p.line(t)
	if !strings.HasPrefix(first, "following connections to ") {
		t.Fatalf("the first line is %q", first)
	}
	connect()
	code, rest := p.exit(t)
	return code, strings.Join(rest, "\n") + "\n" + p.log()
}

// contains checks that a text contains all parts.
func contains(t *testing.T, text string, parts ...string) {
	t.Helper()
	for _, part := range parts {
		if !strings.Contains(text, part) {
			t.Errorf("no %q in:\n%s", part, text)
		}
	}
}

// refused makes a connection that must be refused.
func (s *site) refused(t *testing.T, to string) {
	t.Helper()
	c, err := lab.Dial(s.Client, "tcp", "", to, testtime.Timeout)
	if err == nil {
		c.Close()
	}
	if !errors.Is(err, syscall.ECONNREFUSED) {
		t.Errorf("%s: error %v", to, err)
	}
}

// unanswered makes a connection that must get no answer.
func (s *site) unanswered(t *testing.T, to string) {
	t.Helper()
	c, err := lab.Dial(s.Client, "tcp", "", to, lab.NoAnswerTimeout)
	if err == nil {
		c.Close()
	}
	if !lab.IsTimeout(err) {
		t.Errorf("%s: error %v", to, err)
	}
}

const emptyService = `apiVersion: v1
kind: Service
metadata:
  name: empty
spec:
  clusterIP: 10.96.0.40
  ports:
  - {name: http, port: 80}
`

// TestTraceAgrees follows connections that go where the objects require, in each mode.
func TestTraceAgrees(t *testing.T) {
	t.Parallel()
	for _, flavor := range []string{"nftables", "iptables-nft", "iptables-legacy"} {
		t.Run(flavor, func(t *testing.T) {
			t.Parallel()
			mode, kind, _ := strings.Cut(flavor, "-")
			var env []string
			if mode == "iptables" {
				netlab.NeedPrograms(t, flavor)
				env = []string{"PATH=" + flavorPath(t, kind)}
			}
			s := newSite(t)
			dir := t.TempDir()
			put(t, dir, "web.yaml", webService+"---\n"+webSlice(podIPs[:2]...)+"---\n"+emptyService)
			flags := []string{"--manifests", dir, "--hostname-override", "n1", "--proxy-mode", mode, "--cluster-cidr", "10.1.0.0/16"}
			start := func(args ...string) *process { return startWith(t, s.Node, env, append(args, flags...)...) }
			start("run").synced(t, "services=2 endpoints=2 changed=2")

			for _, by := range []string{"nftrace", "conntrack"} {
				code, out := runTrace(t, s.Node, func() { s.answeredBy(t, clusterVIP, podIPs[:2]...) },
					append(flags, "--count", "5", "--by", by, clusterVIP)...)
				contains(t, out, "connection: 192.0.2.9:", " to 10.96.0.10:80/TCP", "kernel: endpoint 10.1.0.", ":8080, masqueraded",
					"must: forward: ", "\nagrees\n", ":8080 got ", "\n5 connections: 5 forwarded, 0 refused, 0 neither; kernel and objects AGREE\n")
				if by == "nftrace" {
					contains(t, out, ", in by eth0\n", ", out by pods\n")
				}
				if code != 0 {
					t.Errorf("exit status %d", code)
				}
			}
			if flavor == "iptables-legacy" {
				// trace does not show its rules, but it shows that the packet is lost.
				lock := "XTABLES_LOCKFILE=" + filepath.Join(t.TempDir(), "lock")
				must.Get(s.Node.Output("env", lock, flavor, "-I", "FORWARD", "-p", "tcp", "--dport", "8080", "-j", "DROP"))(t)
				code, out := runTrace(t, s.Node, func() { s.unanswered(t, clusterVIP) }, append(flags, "--count", "1", clusterVIP)...)
				contains(t, out, "kernel: lost after these chains, for a reason that nf_tables does not show: iptables-legacy, ", "DIFFERS: not forwarded", "DIFFER for 1")
				if code != 1 {
					t.Errorf("exit status %d", code)
				}
				return
			}
			netlab.NeedPrograms(t, "nft") // by which trace prints a rule
			code, out := runTrace(t, s.Node, func() { s.refused(t, "10.96.0.40:80") }, append(flags, "--count", "1", "10.96.0.40:80")...)
			contains(t, out, "kernel: refused: table ip ", "that rule: ", "must: reject: ", "0 forwarded, 1 refused, 0 neither; kernel and objects AGREE")
			if code != 0 {
				t.Errorf("exit status %d", code)
			}
		})
	}
}

// TestTraceFollowsTheNodesConnections makes connections from the node itself.
func TestTraceFollowsTheNodesConnections(t *testing.T) {
	t.Parallel()
	s := newSite(t)
	dir := t.TempDir()
	put(t, dir, "web.yaml", webService+"---\n"+webSlice(podIPs[0])+"---\n"+emptyService)
	flags := []string{"--manifests", dir, "--hostname-override", "n1", "--cluster-cidr", "10.1.0.0/16"}
	embed(t, s.Node, append([]string{"run"}, flags...)...).synced(t, "services=2 endpoints=1 changed=2")
	code, out := runTrace(t, s.Node, func() { lab.Visits(s.Node, "", clusterVIP, 1) }, append(flags, "--count", "1", clusterVIP)...)
	contains(t, out, ", from this node\n", "nat-output", "endpoint 10.1.0.2:8080, masqueraded, out by pods\n", "AGREE")
	if code != 0 {
		t.Errorf("exit status %d", code)
	}
	// A connection of the node to itself uses the loopback interface.
	l := must.Get(s.Node.Listen("tcp", "192.0.2.1:7000"))(t)
	defer l.Close()
	code, out = runTrace(t, s.Node, func() {
		if c, err := lab.Dial(s.Node, "tcp", "", "192.0.2.1:7000", testtime.Timeout); err == nil {
			c.Close()
		}
	}, append(flags, "--count", "1", "192.0.2.1:7000")...)
	contains(t, out, ", from this node\n", "destination unchanged, source kept, on this node\n", "must: pass", "AGREE")
	if code != 0 {
		t.Errorf("exit status %d", code)
	}
}

// TestTraceNamesForeignChains adds chains that drop, reject and masquerade packets.
func TestTraceNamesForeignChains(t *testing.T) {
	t.Parallel()
	netlab.NeedPrograms(t, "nft")
	s := newSite(t)
	_, dir := s.serveWeb(t, podIPs[:2])
	flags := []string{"--manifests", dir, "--hostname-override", "n1"}
	for _, tt := range []struct {
		hook, rule string
		want       []string
	}{
		{"filter hook forward priority 5", "ip daddr 10.1.0.0/16 tcp dport 8080 counter drop", []string{
			"kernel: DROPPED by a chain of another program: table inet firewall, chain guard, rule handle ",
			"kernel: that rule: ip daddr 10.1.0.0/16 tcp dport 8080 counter packets",
			"must: endpoint 10.1.0.2:8080, source kept\n",
			"DIFFERS: stopped by another program: table inet firewall, chain guard\n",
		}},
		{"filter hook forward priority 5", "tcp dport 8080 reject", []string{
			"kernel: REFUSED by a chain of another program: table inet firewall, chain guard, rule handle ",
		}},
		{"filter hook prerouting priority -300; policy drop", "tcp dport 22 accept", []string{
			"kernel: DROPPED by a chain of another program: table inet firewall, chain guard, by its policy\n",
		}},
		{"nat hook postrouting priority 101", "tcp dport 8080 masquerade", []string{
			"table inet firewall, chains guard\n", ":8080, masqueraded, out by pods\n",
			"DIFFERS: masqueraded, but must be: source kept\n",
		}},
	} {
		must.Get(s.Node.Run(t, "nft", "table inet firewall { chain guard { type "+tt.hook+"; "+tt.rule+"; }; }"))(t)
		code, out := runTrace(t, s.Node, func() {
			if c, err := lab.Dial(s.Client, "tcp", "", clusterVIP, lab.NoAnswerTimeout); err == nil {
				c.Close()
			}
		}, append(flags, "--count", "1", clusterVIP)...)
		contains(t, out, append(tt.want, "kernel and objects DIFFER for 1\n")...)
		if code != 1 {
			t.Errorf("%s: exit status %d", tt.rule, code)
		}
		must.Get(s.Node.Run(t, "nft", "delete table inet firewall"))(t)
	}
}

// TestTraceFindsWrongRules traces with objects that differ from the agent's.
func TestTraceFindsWrongRules(t *testing.T) {
	t.Parallel()
	s := newSite(t)
	dir, other := t.TempDir(), t.TempDir()
	put(t, dir, "web.yaml", webService+"---\n"+webSlice(podIPs[0]))
	put(t, other, "web.yaml", webService+"---\n"+webSlice(podIPs[1]))
	embed(t, s.Node, "run", "--manifests", dir).synced(t, "services=1 endpoints=1 changed=1")
	code, out := runTrace(t, s.Node, func() { s.answeredBy(t, clusterVIP, podIPs[0]) }, "--manifests", other, "--count", "1", clusterVIP)
	contains(t, out, "must: endpoint 10.1.0.3:8080, source kept\n", "DIFFERS: 10.1.0.2:8080 is not one of the expected endpoints\n", "DIFFER for 1\n")
	if code != 1 {
		t.Errorf("exit status %d", code)
	}
	// --must=false compares nothing, and --from selects one source.
	code, out = runTrace(t, s.Node, func() {
		lab.Visits(s.Client, "", clusterVIP, 1)
		lab.Visits(s.Node, "", clusterVIP, 1)
	}, "--must=false", "--count", "1", "--from", "192.0.2.1", clusterVIP)
	contains(t, out, "connection: 192.0.2.1:", "\n1 connection: 1 forwarded, 0 refused, 0 neither\n")
	if code != 0 {
		t.Errorf("exit status %d", code)
	}
}

// TestTraceFollowsChangesOfObjects changes the objects while trace runs.
func TestTraceFollowsChangesOfObjects(t *testing.T) {
	t.Parallel()
	s := newSite(t)
	p, dir := s.serveWeb(t, podIPs[:1], "--min-sync-period", "0s")
	code, out := runTrace(t, s.Node, func() {
		s.answeredBy(t, clusterVIP, podIPs[0])
		put(t, dir, "web.yaml", webService+"---\n"+webSlice(podIPs[1]))
		p.synced(t, "services=1 endpoints=1 changed=1")
		s.answeredBy(t, clusterVIP, podIPs[1])
	}, "--manifests", dir, "--count", "100", clusterVIP)
	contains(t, out, "endpoint 10.1.0.2:8080", "endpoint 10.1.0.3:8080", "100 forwarded", "AGREE")
	if code != 0 {
		t.Errorf("exit status %d", code)
	}
}

// TestTraceFollowsUDP sends datagrams over IPv6. Only the first datagram of a connection
// counts.
func TestTraceFollowsUDP(t *testing.T) {
	t.Parallel()
	netlab.Require(t)
	d := must.Get(lab.New())(t)
	t.Cleanup(func() { d.Close() })
	flags := []string{"--manifests", "../demo/world", "--hostname-override", "node-1", "--cluster-cidr", "10.1.0.0/16,fd00:10:1::/48"}
	wd := must.Get(os.Getwd())(t)
	flags[1] = filepath.Join(wd, "../demo/world")
	embed(t, d.Node, append([]string{"run"}, flags...)...).line(t)
	to := "[fd00:10:96::53]:53"
	code, out := runTrace(t, d.Node, func() {
		for range 2 {
			c := must.Get(lab.Dial(d.Pod2, "udp", "", to, testtime.Timeout))(t)
			for range 3 {
				if _, _, err := c.Ask(); err != nil {
					t.Error(err)
				}
			}
			c.Close()
		}
	}, append(flags, "--count", "2", to+"/udp")...)
	contains(t, out, "connection: [fd00:10:1:1::3]:", ", in by veth-pod-2\n", "kernel: endpoint [fd00:10:1:", "2 connections: 2 forwarded, 0 refused, 0 neither; kernel and objects AGREE")
	if code != 0 {
		t.Errorf("exit status %d", code)
	}
}

// TestTraceLeavesNoTable ends trace by signals, such as SIGKILL.
func TestTraceLeavesNoTable(t *testing.T) {
	t.Parallel()
	netlab.NeedPrograms(t, "nft")
	s := newSite(t)
	tables := func() string {
		out := must.Get(s.Node.Run(t, "nft", "list tables"))(t)
		return out
	}
	for _, signal := range []os.Signal{syscall.SIGKILL, os.Interrupt} {
		p := start(t, s.Node, "trace", "--must=false", "--for", "5m", clusterVIP)
		p.line(t)
		if got := tables(); !strings.HasPrefix(got, "table ip proxier-trace-") {
			t.Fatalf("tables while trace runs:\n%s", got)
		}
		p.Process.Signal(signal)
		code, rest := p.exit(t)
		if signal == os.Interrupt && (code != 1 || !strings.Contains(strings.Join(rest, "\n"), "no new connection to 10.96.0.10:80 was seen")) {
			t.Errorf("interrupted: exit status %d, lines %q", code, rest)
		}
		if got := tables(); got != "" {
			t.Errorf("%v leaves tables:\n%s", signal, got)
		}
	}
}

// TestTraceNeedsCapNetAdmin runs trace as an ordinary user.
func TestTraceNeedsCapNetAdmin(t *testing.T) {
	t.Parallel()
	s := newSite(t)
	for _, by := range []string{"nftrace", "conntrack"} {
		p := startWith(t, s.Node, []string{otherUserEnv + "=1"}, "trace", "--must=false", "--by", by, clusterVIP)
		if code, _ := p.exit(t); code != 1 || !strings.Contains(p.log(), "needs CAP_NET_ADMIN in this network namespace: run it as root") {
			t.Errorf("--by %s: exit status %d, log:\n%s", by, code, p.log())
		}
	}
}

// TestTraceFollowsTheReply traces connections to an endpoint that answers, to one without a
// server, and to one whose packets are lost beyond the node.
func TestTraceFollowsTheReply(t *testing.T) {
	t.Parallel()
	s := newSite(t)
	dir := t.TempDir()
	trace := func(reply string, code int, ep string, port string) {
		t.Helper()
		put(t, dir, "web.yaml", webService+"---\n"+strings.Replace(webSlice(ep), "port: 8080", "port: "+port, 1))
		p := embed(t, s.Node, "run", "--manifests", dir, "--hostname-override", "n1", "--min-sync-period", "0s")
		p.synced(t, "services=1 endpoints=1 changed=1")
		got, out := runTrace(t, s.Node, func() {
			if c, err := lab.Dial(s.Client, "tcp", "", clusterVIP, lab.NoAnswerTimeout); err == nil {
				c.Close()
			}
		}, "--manifests", dir, "--hostname-override", "n1", "--count", "1", clusterVIP)
		contains(t, out, "endpoint "+ep+":"+port+" got 1 of 1: 1 "+reply+"\n", "kernel and objects AGREE")
		if got != code {
			t.Errorf("%s: exit status %d, want %d:\n%s", reply, got, code, out)
		}
		p.stop(t)
	}
	trace("answered", 0, podIPs[0], "8080")
	trace("reset by the endpoint", 1, podIPs[0], "8081")
	netlab.NeedPrograms(t, "nft")
	const lossy = "table inet lossy { chain in { type filter hook input priority 0; tcp dport 8080 drop; }; }"
	must.Get(s.pods.Run(t, "nft", lossy))(t)
	trace("silent", 1, podIPs[0], "8080")
}
