//go:build linux

package wholeagent

import (
	"fmt"
	"net"
	"os"
	"os/exec"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/go-proxier/proxier/examples/internal/node/modes"
	"github.com/go-proxier/proxier/examples/nodeproxy/internal/lab"
	"github.com/go-proxier/proxier/examples/nodeproxy/internal/run"
	"github.com/go-proxier/proxier/internal/testing/must"
	"github.com/go-proxier/proxier/internal/testing/netlab"
	"github.com/go-proxier/proxier/internal/testing/testtime"
	"github.com/go-proxier/proxier/internal/testing/vm"
)

// kubeProxyIPVS creates the state that kube-proxy's ipvs mode leaves on a node of the site, for
// the Service web with its first endpoint and --cluster-cidr 10.1.0.0/16. It has the same sets,
// chains, rules and order, including sets and chains that only other Services use.
//
// The timeout of established connections is two minutes instead of 15. When two processors handle the
// last packets of a connection, IPVS can mark it as closed but leave it the timer of an established
// one (ip_vs_conn_put reads the timeout before it sets the timer), and drains last until then.
const kubeProxyIPVS = `set -e
sysctl() { echo $2 > /proc/sys/net/ipv4/$1; }
sysctl vs/conntrack 1; sysctl vs/conn_reuse_mode 0; sysctl vs/expire_nodest_conn 1; sysctl vs/expire_quiescent_template 1; sysctl ip_forward 1
ip link add kube-ipvs0 type dummy
ip addr add 10.96.0.10/32 dev kube-ipvs0
ipvsadm --set 120 120 300

ipset restore <<EOF
create KUBE-LOOP-BACK hash:ip,port,ip family inet hashsize 1024 maxelem 65536
create KUBE-CLUSTER-IP hash:ip,port family inet hashsize 1024 maxelem 65536
create KUBE-EXTERNAL-IP hash:ip,port family inet hashsize 1024 maxelem 65536
create KUBE-EXTERNAL-IP-LOCAL hash:ip,port family inet hashsize 1024 maxelem 65536
create KUBE-LOAD-BALANCER hash:ip,port family inet hashsize 1024 maxelem 65536
create KUBE-LOAD-BALANCER-FW hash:ip,port family inet hashsize 1024 maxelem 65536
create KUBE-LOAD-BALANCER-LOCAL hash:ip,port family inet hashsize 1024 maxelem 65536
create KUBE-LOAD-BALANCER-SOURCE-IP hash:ip,port,ip family inet hashsize 1024 maxelem 65536
create KUBE-LOAD-BALANCER-SOURCE-CIDR hash:ip,port,net family inet hashsize 1024 maxelem 65536
create KUBE-NODE-PORT-TCP bitmap:port range 0-65535
create KUBE-NODE-PORT-LOCAL-TCP bitmap:port range 0-65535
create KUBE-NODE-PORT-UDP bitmap:port range 0-65535
create KUBE-NODE-PORT-LOCAL-UDP bitmap:port range 0-65535
create KUBE-NODE-PORT-SCTP-HASH hash:ip,port family inet hashsize 1024 maxelem 65536
create KUBE-NODE-PORT-LOCAL-SCTP-HASH hash:ip,port family inet hashsize 1024 maxelem 65536
create KUBE-HEALTH-CHECK-NODE-PORT bitmap:port range 0-65535
create KUBE-IPVS-IPS hash:ip family inet hashsize 1024 maxelem 65536
create KUBE-6-CLUSTER-IP hash:ip,port family inet6 hashsize 1024 maxelem 65536
add KUBE-CLUSTER-IP 10.96.0.10,tcp:80
add KUBE-LOOP-BACK 10.1.0.2,tcp:8080,10.1.0.2
add KUBE-NODE-PORT-TCP 30080
add KUBE-IPVS-IPS 10.96.0.10
EOF

ipvsadm -R <<EOF
-A -t 10.96.0.10:80 -s rr
-a -t 10.96.0.10:80 -r 10.1.0.2:8080 -m -w 1
-A -t 192.0.2.1:30080 -s rr
-a -t 192.0.2.1:30080 -r 10.1.0.2:8080 -m -w 1
-A -t 10.1.0.1:30080 -s rr
-a -t 10.1.0.1:30080 -r 10.1.0.2:8080 -m -w 1
EOF

iptables-restore --noflush <<EOF
*mangle
:KUBE-PROXY-CANARY - [0:0]
COMMIT
*nat
:KUBE-PROXY-CANARY - [0:0]
:KUBE-SERVICES - [0:0]
:KUBE-POSTROUTING - [0:0]
:KUBE-NODE-PORT - [0:0]
:KUBE-LOAD-BALANCER - [0:0]
:KUBE-MARK-MASQ - [0:0]
-I PREROUTING -m comment --comment "kubernetes service portals" -j KUBE-SERVICES
-I OUTPUT -m comment --comment "kubernetes service portals" -j KUBE-SERVICES
-I POSTROUTING -m comment --comment "kubernetes postrouting rules" -j KUBE-POSTROUTING
-A KUBE-SERVICES -s 127.0.0.0/8 -j RETURN
-A KUBE-SERVICES -m comment --comment "Kubernetes service lb portal" -m set --match-set KUBE-LOAD-BALANCER dst,dst -j KUBE-LOAD-BALANCER
-A KUBE-SERVICES ! -s 10.1.0.0/16 -m comment --comment "Kubernetes service cluster ip + port for masquerade purpose" -m set --match-set KUBE-CLUSTER-IP dst,dst -j KUBE-MARK-MASQ
-A KUBE-SERVICES -m comment --comment "Kubernetes service external ip + port for masquerade and filter purpose" -m set --match-set KUBE-EXTERNAL-IP dst,dst -j KUBE-MARK-MASQ
-A KUBE-SERVICES -m comment --comment "Kubernetes service external ip + port for masquerade and filter purpose" -m set --match-set KUBE-EXTERNAL-IP dst,dst -m physdev ! --physdev-is-in -m addrtype ! --src-type LOCAL -j ACCEPT
-A KUBE-SERVICES -m addrtype --dst-type LOCAL -j KUBE-NODE-PORT
-A KUBE-SERVICES -m set --match-set KUBE-CLUSTER-IP dst,dst -j ACCEPT
-A KUBE-SERVICES -m set --match-set KUBE-LOAD-BALANCER dst,dst -j ACCEPT
-A KUBE-LOAD-BALANCER -m comment --comment "Kubernetes service load balancer ip + port with externalTrafficPolicy=local" -m set --match-set KUBE-LOAD-BALANCER-LOCAL dst,dst -j RETURN
-A KUBE-LOAD-BALANCER -j KUBE-MARK-MASQ
-A KUBE-NODE-PORT -p tcp -m comment --comment "Kubernetes nodeport TCP port with externalTrafficPolicy=local" -m set --match-set KUBE-NODE-PORT-LOCAL-TCP dst -j RETURN
-A KUBE-NODE-PORT -p tcp -m comment --comment "Kubernetes nodeport TCP port for masquerade purpose" -m set --match-set KUBE-NODE-PORT-TCP dst -j KUBE-MARK-MASQ
-A KUBE-POSTROUTING -m comment --comment "Kubernetes endpoints dst ip:port, source ip for solving hairpin purpose" -m set --match-set KUBE-LOOP-BACK dst,dst,src -j MASQUERADE
-A KUBE-POSTROUTING -m mark ! --mark 0x4000/0x4000 -j RETURN
-A KUBE-POSTROUTING -j MARK --set-xmark 0x4000/0x0
-A KUBE-POSTROUTING -m comment --comment "kubernetes service traffic requiring SNAT" -j MASQUERADE --random-fully
-A KUBE-MARK-MASQ -j MARK --set-xmark 0x4000/0x4000
COMMIT
*filter
:KUBE-PROXY-CANARY - [0:0]
:KUBE-FORWARD - [0:0]
:KUBE-NODE-PORT - [0:0]
:KUBE-PROXY-FIREWALL - [0:0]
:KUBE-SOURCE-RANGES-FIREWALL - [0:0]
:KUBE-IPVS-FILTER - [0:0]
:KUBE-IPVS-OUT-FILTER - [0:0]
-I INPUT -m comment --comment "kubernetes ipvs access filter" -j KUBE-IPVS-FILTER
-I INPUT -m comment --comment "kube-proxy firewall rules" -j KUBE-PROXY-FIREWALL
-I INPUT -m comment --comment "kubernetes health check rules" -j KUBE-NODE-PORT
-I FORWARD -m comment --comment "kube-proxy firewall rules" -j KUBE-PROXY-FIREWALL
-I FORWARD -m comment --comment "kubernetes forwarding rules" -j KUBE-FORWARD
-I OUTPUT -m comment --comment "kubernetes ipvs access filter" -j KUBE-IPVS-OUT-FILTER
-A KUBE-FORWARD -m comment --comment "kubernetes forwarding rules" -m mark --mark 0x4000/0x4000 -j ACCEPT
-A KUBE-FORWARD -m comment --comment "kubernetes forwarding conntrack rule" -m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT
-A KUBE-NODE-PORT -m comment --comment "Kubernetes health check node port" -m set --match-set KUBE-HEALTH-CHECK-NODE-PORT dst -j ACCEPT
-A KUBE-PROXY-FIREWALL -m comment --comment "Kubernetes service load balancer ip + port for load balancer with sourceRange" -m set --match-set KUBE-LOAD-BALANCER-FW dst,dst -j KUBE-SOURCE-RANGES-FIREWALL
-A KUBE-SOURCE-RANGES-FIREWALL -m comment --comment "Kubernetes service load balancer ip + port + source cidr for packet filter" -m set --match-set KUBE-LOAD-BALANCER-SOURCE-CIDR dst,dst,src -j RETURN
-A KUBE-SOURCE-RANGES-FIREWALL -j DROP
-A KUBE-IPVS-FILTER -m set --match-set KUBE-LOAD-BALANCER dst,dst -j RETURN
-A KUBE-IPVS-FILTER -m set --match-set KUBE-CLUSTER-IP dst,dst -j RETURN
-A KUBE-IPVS-FILTER -m set --match-set KUBE-EXTERNAL-IP dst,dst -j RETURN
-A KUBE-IPVS-FILTER -m set --match-set KUBE-HEALTH-CHECK-NODE-PORT dst -j RETURN
-A KUBE-IPVS-FILTER -m conntrack --ctstate NEW -m set --match-set KUBE-IPVS-IPS dst -j REJECT
COMMIT
EOF

ip6tables-restore --noflush <<EOF
*nat
:KUBE-SERVICES - [0:0]
:KUBE-NODE-PORT - [0:0]
:KUBE-LOAD-BALANCER - [0:0]
-I PREROUTING -m comment --comment "kubernetes service portals" -j KUBE-SERVICES
-A KUBE-SERVICES -m addrtype --dst-type LOCAL -j KUBE-NODE-PORT
-A KUBE-SERVICES -m set --match-set KUBE-6-CLUSTER-IP dst,dst -j ACCEPT
COMMIT
*filter
:KUBE-IPVS-FILTER - [0:0]
-I INPUT -m comment --comment "kubernetes ipvs access filter" -j KUBE-IPVS-FILTER
COMMIT
EOF
`

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

// adoptIPVS takes a node over from kube-proxy's ipvs mode, while connections are
// opened all the time and one stays open. It needs a kernel with IPVS.
func adoptIPVS(t *testing.T) {
	for _, to := range []string{"nftables", "iptables", "ipvs"} {
		t.Run("to="+to, func(t *testing.T) {
			args := func(dir string) []string {
				return []string{
					"run", "--manifests", dir + "/web.yaml", "--hostname-override", "n1", "--min-sync-period", "0s",
					"--cluster-cidr", "10.1.0.0/16", "--proxy-mode", to,
				}
			}
			dir := t.TempDir()
			rollOut(t, dir, podIPs[0])
			// The agent's own state on a node that has never had other rules.
			var want []string
			if to != "nftables" {
				fresh := newSite(t)
				p := start(t, fresh.Node, args(dir)...)
				p.synced(t, "services=1 endpoints=1 changed=1")
				want = traces(t, fresh.Node)
				p.kill(t)
			}

			s := newSite(t)
			put(t, dir, "kube-proxy", kubeProxyIPVS)
			must.Get(s.Node.Output("sh", dir+"/kube-proxy"))(t)
			before := traces(t, s.Node)
			long, err := lab.Dial(s.Client, "tcp", "", nodePort, testtime.Timeout)
			if err != nil {
				t.Fatalf("kube-proxy's rules of the test are wrong: %v", err)
			}
			defer long.Close()
			if _, _, err := long.Hear(); err != nil {
				t.Fatal(err)
			}
			stream := briefStream(t, s)
			stream.Next(10)

			// Without the flag the agent leaves kube-proxy's state in place.
			if to == "nftables" {
				p := start(t, s.Node, args(dir)...)
				p.synced(t, "services=1 endpoints=1 changed=1")
				stream.Next(10)
				p.kill(t)
				if now := traces(t, s.Node); !slices.Equal(now, before) {
					t.Errorf("changed without the flag:\n%s", difference(now, before))
				}
			}
			p := start(t, s.Node, append(args(dir), "--adopt-from-kube-proxy")...)
			p.synced(t, "services=1 endpoints=1 changed=1")
			stream.Next(10)
			if _, _, err := long.Ask(); err != nil {
				t.Errorf("the old connection: %v", err)
			}
			stream.Next(10)
			if y := stream.Stop(); len(y.Errs) != 0 {
				t.Errorf("%d connections failed, first: %v", len(y.Errs), y.Errs[0])
			}
			if _, _, err := long.Ask(); err != nil {
				t.Errorf("the old connection: %v", err)
			}
			reset(long)
			for end := time.Now().Add(5 * time.Minute); ; time.Sleep(time.Second) {
				now := traces(t, s.Node)
				if slices.Equal(now, want) {
					break
				}
				if time.Now().After(end) {
					conns, _ := s.Node.Run(t, "ipvsadm", "-Lnc")
					t.Fatalf("log:\n%s\nconnections of IPVS:\n%s\nleft when all connections had ended:\n%s", p.log(), conns, difference(now, want))
				}
			}
			s.answeredBy(t, clusterVIP, podIPs[0])
			s.answeredBy(t, nodePort, podIPs[0])
			if p.loggedErrors() {
				t.Errorf("log:\n%s", p.log())
			}
		})
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
	dir := t.TempDir()
	put(t, dir, "kube-proxy", kubeProxyIPVS)
	must.Get(s.Node.Output("sh", dir+"/kube-proxy"))(t)
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
	t.Run("adopt", adoptIPVS)
	t.Run("take over", takeOverIPVS)
	t.Run("leave", leaveForIPVS)
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
	dir := t.TempDir()
	put(t, dir, "web.yaml", webService+"---\n"+webSlice(podIPs[:2]...)+"---\n"+emptyService)
	flags := []string{"--manifests", dir, "--hostname-override", "n1", "--proxy-mode", "ipvs", "--cluster-cidr", "10.1.0.0/16"}
	start(t, s.Node, append([]string{"run", "--min-sync-period", "0s"}, flags...)...).synced(t, "services=2 endpoints=2 changed=2")
	for _, by := range []string{"conntrack", "nftrace"} {
		code, out := runTrace(t, s.Node, func() { s.answeredBy(t, clusterVIP, podIPs[:2]...) },
			append(flags, "--count", "5", "--by", by, clusterVIP)...)
		contains(t, out, "connection: 192.0.2.9:", "kernel: endpoint 10.1.0.", ":8080, masqueraded", "must: forward: ",
			"\n5 connections: 5 forwarded, 0 refused, 0 neither; kernel and objects AGREE\n")
		if code != 0 {
			t.Errorf("--by %s: exit status %d", by, code)
		}
	}
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
	var want uint64
	for _, c := range run.Needed(false) {
		want |= 1 << c
	}
	for _, set := range []string{"CapEff", "CapPrm", "CapBnd"} {
		if got := capabilities(t, p.Process.Pid, set); got != want {
			t.Errorf("%s is %x, want %x", set, got, want)
		}
	}
	s.answeredBy(t, clusterVIP, podIPs[0])
	p.logged(t, "kube-proxy has deprecated its mode ipvs")

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
