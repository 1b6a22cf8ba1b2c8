//go:build linux

package wholeagent

import (
	"errors"
	"os"
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
metadata: {name: empty}
spec: {clusterIP: 10.96.0.40, ports: [{name: http, port: 80}]}
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
			flags := s.traceAgrees(t, mode, env)
			if flavor == "iptables-legacy" {
				// trace does not show its rules, but it shows that the packet is lost.
				must.Get(s.Node.Output(flavor, "-I", "FORWARD", "-p", "tcp", "--dport", "8080", "-j", "DROP"))(t)
				s.follows(t, 1, func() { s.unanswered(t, clusterVIP) }, append(flags, "--count", "1", clusterVIP),
					"kernel: lost after these chains, for a reason that nf_tables does not show: iptables-legacy, ", "DIFFERS: not forwarded", "DIFFER for 1")
				return
			}
			netlab.NeedPrograms(t, "nft") // by which trace prints a rule
			s.follows(t, 0, func() { s.refused(t, "10.96.0.40:80") }, append(flags, "--count", "1", "10.96.0.40:80"),
				"kernel: refused: table ip ", "that rule: ", "must: reject: ", "0 forwarded, 1 refused, 0 neither; kernel and objects AGREE")
		})
	}
}

// traceAgrees serves the Services web and empty, and follows connections in each way. It returns the flags for the Services.
func (s *site) traceAgrees(t *testing.T, mode string, env []string) []string {
	t.Helper()
	dir := t.TempDir()
	put(t, dir, "web.yaml", webService+"---\n"+webSlice(podIPs[:2]...)+"---\n"+emptyService)
	flags := []string{"--manifests", dir, "--hostname-override", "n1", "--proxy-mode", mode, "--cluster-cidr", "10.1.0.0/16"}
	startWith(t, s.Node, env, append([]string{"run", "--min-sync-period", "0s"}, flags...)...).synced(t, "services=2 endpoints=2 changed=2")
	for by, shown := range map[string][]string{"nftrace": {", in by eth0\n", ", out by pods\n"}, "conntrack": nil} {
		if mode == "ipvs" {
			shown = nil
		}
		s.follows(t, 0, func() { s.answeredBy(t, clusterVIP, podIPs[:2]...) }, append(flags, "--count", "5", "--by", by, clusterVIP),
			append(shown, "connection: 192.0.2.9:", " to 10.96.0.10:80/TCP", "kernel: endpoint 10.1.0.", ":8080, masqueraded", "must: forward: ", "\nagrees\n",
				":8080 got ", "\n5 connections: 5 forwarded, 0 refused, 0 neither; kernel and objects AGREE\n")...)
	}
	return flags
}

// follows checks the exit status and parts of the output of trace while connect makes connections.
func (s *site) follows(t *testing.T, want int, connect func(), args []string, parts ...string) {
	t.Helper()
	code, out := runTrace(t, s.Node, connect, args...)
	contains(t, out, parts...)
	if code != want {
		t.Errorf("exit status %d, want %d", code, want)
	}
}

// TestTraceSaysWhatHappens follows connections that foreign chains, wrong objects and endpoints stop, change or
// delay, and such from the node itself and over UDP and IPv6. One agent serves all cases.
func TestTraceSaysWhatHappens(t *testing.T) {
	t.Parallel()
	netlab.NeedPrograms(t, "nft")
	s := localhostSite(t)
	s.Client.Addrs("eth0", "2001:db8::9/64")
	s.Node.Routes("", "2001:db8::9", "::/0")
	objects := func(web string) string {
		return webService + "---\n" + web + "---\n" + dualService() + dualSlices("n1", 2)
	}
	all := objects(webSlice(podIPs[0]))
	p := s.agent(t, all)
	p.synced(t, "services=2 endpoints=9 changed=7")
	other := t.TempDir()
	rollOut(t, other, podIPs[1])
	l := must.Get(s.Node.Listen("tcp", "192.0.2.1:7000"))(t)
	defer l.Close()
	dial := func(h *netlab.Host, to string) func() {
		return func() {
			if c, err := lab.Dial(h, "tcp", "", to, lab.NoAnswerTimeout); err == nil {
				c.Close()
			}
		}
	}
	objectsOf := func(dir string) string { return "--count 1 --manifests " + dir + " --hostname-override n1 " }
	one := objectsOf(p.dir) + clusterVIP
	const agrees, differs = "kernel and objects AGREE", "kernel and objects DIFFER for 1\n"
	for _, tt := range []struct {
		name, rule, manifests string // a chain in table inet firewall, and other objects than all
		connect               func()
		args                  string
		code                  int
		want                  []string
	}{
		{"reject", "filter hook forward priority 5; tcp dport 8080 reject", "", dial(s.Client, clusterVIP), one, 1, []string{
			"must: endpoint 10.1.0.2:8080, source kept\n", "kernel: REFUSED by a chain of another program: table inet firewall, chain guard, rule handle ",
			"DIFFERS: stopped by another program: table inet firewall, chain guard\n", differs,
		}},
		{"policy", "filter hook prerouting priority -300; policy drop; tcp dport 22 accept", "", dial(s.Client, clusterVIP), one, 1, []string{
			"kernel: DROPPED by a chain of another program: table inet firewall, chain guard, by its policy\n", differs,
		}},
		{"masquerade", "nat hook postrouting priority 101; tcp dport 8080 masquerade", "", dial(s.Client, clusterVIP), one, 1, []string{
			"table inet firewall, chains guard\n", ":8080, masqueraded, out by pods\n", "DIFFERS: masqueraded, but must be: source kept\n", differs,
		}},
		{"wrong objects", "", "", dial(s.Client, clusterVIP), objectsOf(other) + clusterVIP, 1, []string{
			"must: endpoint 10.1.0.3:8080, source kept\n", "DIFFERS: 10.1.0.2:8080 is not one of the expected endpoints\n", differs,
		}},
		{"reset", "", objects(strings.Replace(webSlice(podIPs[0]), "port: 8080", "port: 8081", 1)), dial(s.Client, clusterVIP), one, 1, []string{
			"endpoint 10.1.0.2:8081 got 1 of 1: 1 reset by the endpoint\n", agrees,
		}},
		{"--from selects one source, and --must=false compares nothing", "", "", func() { dial(s.Client, clusterVIP)(); dial(s.Node, clusterVIP)() }, "--must=false --count 1 --from 192.0.2.1 " + clusterVIP, 0, []string{
			"connection: 192.0.2.1:", "\n1 connection: 1 forwarded, 0 refused, 0 neither\n",
		}},
		{"from the node", "", "", dial(s.Node, clusterVIP), one, 0, []string{", from this node\n", "nat-output", "endpoint 10.1.0.2:8080, source kept, out by pods\n", agrees}},
		{"to itself, by the loopback interface", "", "", dial(s.Node, "192.0.2.1:7000"), objectsOf(p.dir) + "192.0.2.1:7000", 0, []string{
			", from this node\n", "destination unchanged, source kept, on this node\n", "must: pass", agrees,
		}},
		{"the first datagram of a connection counts", "", "", func() {
			for range 2 {
				c := must.Get(s.dialNew("udp", "[fd00:96::20]:53"))(t)
				for range 3 {
					if _, _, err := c.Ask(); err != nil {
						t.Error(err)
					}
				}
				c.Close()
			}
		}, strings.Replace(objectsOf(p.dir), "1", "2", 1) + "[fd00:96::20]:53/udp", 0, []string{"connection: [", "kernel: endpoint [fd00:1::", "2 connections: 2 forwarded, 0 refused, 0 neither; " + agrees}},
		{"objects change", "", "", func() {
			s.answeredBy(t, clusterVIP, podIPs[0])
			put(t, p.dir, "web.yaml", objects(webSlice(podIPs[1])))
			p.line(t)
			s.answeredBy(t, clusterVIP, podIPs[1])
		}, strings.Replace(one, "1", "100", 1), 0, []string{"endpoint 10.1.0.2:8080", "endpoint 10.1.0.3:8080", "100 forwarded", "AGREE"}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			if tt.manifests != "" {
				put(t, p.dir, "web.yaml", tt.manifests)
				p.line(t)
				defer func() { put(t, p.dir, "web.yaml", all); p.line(t) }()
			}
			if tt.rule != "" {
				must.Get(s.Node.Run(t, "nft", "table inet firewall { chain guard { type "+tt.rule+"; }; }"))(t)
				defer s.Node.Run(t, "nft", "delete table inet firewall")
			}
			s.follows(t, tt.code, tt.connect, strings.Fields(tt.args), tt.want...)
		})
	}
}

// TestTraceLeavesNoTable ends trace by signals, such as SIGKILL.
func TestTraceLeavesNoTable(t *testing.T) {
	t.Parallel()
	netlab.NeedPrograms(t, "nft")
	s := newSite(t)
	tables := func() string { t.Helper(); return must.Get(s.Node.Run(t, "nft", "list tables"))(t) }
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
