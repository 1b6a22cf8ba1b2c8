//go:build linux

package wholeagent

import (
	"errors"
	"fmt"
	"net/netip"
	"os"
	"strings"
	"syscall"
	"testing"

	"github.com/go-proxier/proxier/examples/internal/node/modes"
	"github.com/go-proxier/proxier/examples/nodeproxy/internal/lab"
	"github.com/go-proxier/proxier/examples/userspace/vip"
	"github.com/go-proxier/proxier/internal/testing/must"
	"github.com/go-proxier/proxier/internal/testing/netlab"
)

// heldAddresses returns the number of addresses of Services that a node has in mode userspace.
func heldAddresses(t *testing.T, h *netlab.Host) (n int) {
	t.Helper()
	must.Do(t, h.Do(func() error {
		return modes.WithAddresses(func(a *vip.Addresses) error {
			held, err := a.Held()
			n = len(held)
			return err
		})
	}))
	return n
}

// TestModeUserspaceServesANode connects from outside and from the node, and changes the mode.
func TestModeUserspaceServesANode(t *testing.T) {
	t.Parallel()
	s := newSite(t)
	p := s.serveWeb(t, podIPs[:2], "--proxy-mode", "userspace", "--nodeport-addresses", "primary,localhost",
		"--metrics-bind-address", "192.0.2.1:10249", "--service-traffic-metrics")
	s.answeredBy(t, clusterVIP, podIPs[:2]...)
	s.answeredBy(t, nodePort, podIPs[:2]...)
	for _, to := range []string{clusterVIP, nodePort, "127.0.0.1:30080"} {
		if got := s.reached("tcp", to); got != strings.Join(podIPs[:2], " ") {
			t.Errorf("from the node %s reaches %q", to, got)
		}
	}
	if rules := rules(t, s.Node); rules["nftables"] || rules["iptables"] {
		t.Errorf("rules in the kernel: %v", rules)
	}
	p.web(t, podIPs[2])
	s.answeredBy(t, clusterVIP, podIPs[2])
	p.web(t)
	eventually(t, "the Service refuses", func() bool {
		_, _, err := lab.Visit(s.Client, "", clusterVIP)
		return errors.Is(err, syscall.ECONNREFUSED)
	})
	p.web(t, podIPs[2])

	const at = "http://192.0.2.1:10249"
	if _, text, _ := get(t, s.Client, at+"/proxyMode"); text != "userspace" {
		t.Errorf("/proxyMode: %q", text)
	}
	_, text, _ := get(t, s.Client, at+"/metrics")
	if !strings.Contains(text, "\nproxier_service_connections_total{") || strings.Contains(text, "nftables") && strings.Contains(text, "kubeproxy_sync_proxy_rules_nftables") {
		t.Errorf("metrics:\n%s", text)
	}
	if code, _, _ := get(t, s.Client, "http://192.0.2.1:10256/livez"); code != 200 {
		t.Errorf("/livez: %d", code)
	}

	// Another process removes the address, and an interface gets one. The agent looks every ten seconds.
	s.Node.Addrs("pods", "10.1.0.9/24")
	must.Do(t, s.Node.Do(func() error { return modes.Userspace().Cleanup(t.Context(), nil) }))
	p.logged(t, "repairing the rules")
	p.logged(t, "the node's addresses changed")
	eventually(t, "the address is back", func() bool { return heldAddresses(t, s.Node) == 1 })

	// Nothing is left after a normal end, and what a killed agent leaves, the next mode or
	// --cleanup removes.
	if code, _ := p.stop(t); code != 0 || !strings.Contains(p.log(), "Services are not served until the next start") || p.loggedErrors() {
		t.Errorf("exit status %d, log:\n%s", code, p.log())
	}
	if n := heldAddresses(t, s.Node); n != 0 {
		t.Errorf("%d addresses are left", n)
	}
	web := []string{"run", "--manifests", p.dir, "--hostname-override", "n1"}
	for _, next := range [][]string{
		web,
		{"run", "--cleanup"},
	} {
		p = start(t, s.Node, append(web, "--proxy-mode", "userspace")...)
		p.synced(t, "services=1 endpoints=1 changed=1")
		eventually(t, "the rules of another mode are removed", func() bool { return !rules(t, s.Node)["nftables"] })
		p.kill(t)
		if n := heldAddresses(t, s.Node); n != 1 {
			t.Errorf("%d addresses after SIGKILL", n)
		}
		p = embed(t, s.Node, next...)
		if len(next) > 2 {
			p.synced(t, "services=1 endpoints=1 changed=1")
		}
		eventually(t, fmt.Sprintf("%v removes the addresses", next), func() bool { return heldAddresses(t, s.Node) == 0 })
		if len(next) > 2 {
			s.answeredBy(t, clusterVIP, podIPs[2])
			p.stop(t)
		}
	}
}

// TestModeUserspaceNeedsNoPrivileges runs the agent without any capability on the node.
func TestModeUserspaceNeedsNoPrivileges(t *testing.T) {
	t.Parallel()
	s := newSite(t)
	dir := t.TempDir()
	must.Do(t, os.Chmod(dir, 0o755))
	put(t, dir, "web.yaml", webService+"  - {name: high, port: 8080, targetPort: http}\n---\n"+strings.Replace(webSlice(podIPs[0]), "- {name: http, port: 8080}", "- {name: http, port: 8080}\n- {name: high, port: 8080}", 1))
	run := func() *process {
		p := startWith(t, s.Node, []string{otherUserEnv + "=1"}, "run", "--manifests", dir, "--hostname-override", "n1", "--proxy-mode", "userspace",
			"--nodeport-addresses", "primary,localhost", "--adopt-from-kube-proxy")
		p.synced(t, "services=1 endpoints=2 changed=2") // no failed=
		p.logged(t, "--adopt-from-kube-proxy has no effect without CAP_NET_ADMIN")
		p.logged(t, "without CAP_NET_ADMIN, only addresses that the node already has are served")
		return p
	}
	p := run()
	p.logged(t, "without CAP_NET_BIND_SERVICE, low ports are not served")
	s.answeredBy(t, nodePort, podIPs[0])
	if got := s.reached("tcp", "127.0.0.1:30080"); got != podIPs[0] {
		t.Errorf("127.0.0.1 reaches %q", got)
	}
	if c, err := lab.Dial(s.Node, "tcp", "", "10.96.0.10:8080", lab.NoAnswerTimeout); err == nil {
		c.Close()
		t.Error("a cluster IP is reachable without an address")
	}
	// It takes no socket either: 10.96.0.10 in the kernel's notation, as a local address.
	if list, err := s.Node.Output("cat", "/proc/net/tcp"); err != nil || strings.Contains(list, ": 0A00600A:") || !strings.Contains(list, " 0100007F:7580 ") {
		t.Errorf("sockets, error %v:\n%s", err, list)
	}
	if strings.Contains(p.log(), "sync failed") || p.loggedErrors() {
		t.Errorf("log:\n%s", p.log())
	}
	p.kill(t)

	// With a local route the node has all cluster IPs.
	s.Node.AddLocal(netip.MustParsePrefix("10.96.0.0/16"))
	p = run()
	s.answeredBy(t, "10.96.0.10:8080", podIPs[0])
	if _, _, err := lab.Visit(s.Node, "", clusterVIP); err == nil || !strings.Contains(err.Error(), "refused") {
		t.Errorf("port 80: %v", err)
	}
	p.kill(t)
	must.Do(t, s.Node.Sysctl("net/ipv4/ip_unprivileged_port_start", "0"))
	p = run()
	s.answeredBy(t, clusterVIP, podIPs[0])
	if strings.Contains(p.log(), "low ports") {
		t.Errorf("log:\n%s", p.log())
	}
}
