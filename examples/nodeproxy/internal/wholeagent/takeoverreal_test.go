//go:build linux

package wholeagent

import (
	"bytes"
	"fmt"
	"maps"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"testing"

	"github.com/go-proxier/proxier/examples/nodeproxy/internal/lab"
	"github.com/go-proxier/proxier/internal/testing/must"
	"github.com/go-proxier/proxier/internal/testing/netlab"
)

// TestTakeOverFromRealKubeProxy takes a node over from the kube-proxy that PROXIER_KUBE_PROXY
// names, in each mode, while it runs, and back. With moved ports, only kube-proxy's process shows that
// it runs.
func TestTakeOverFromRealKubeProxy(t *testing.T) {
	t.Parallel()
	takeOverTools(t)
	if testing.Short() {
		t.Skip("takes a minute; run without -short")
	}
	path := os.Getenv("PROXIER_KUBE_PROXY")
	netlab.Need(t, path != "", "PROXIER_KUBE_PROXY: a kube-proxy")
	s := newSite(t)
	control := s.Host("control")
	s.Link(s.Node, "ctl", control, "eth0")
	s.Node.Addrs("ctl", "10.0.0.1/24")
	control.Addrs("eth0", "10.0.0.2/24")
	control.Routes("", "10.0.0.1", "0.0.0.0/0")
	var clients []string
	for i := range 12 {
		clients = append(clients, fmt.Sprintf("192.0.2.%d", 100+i))
		s.Client.Addrs("eth0", clients[i]+"/24")
	}
	c := newCluster(t, control, "10.0.0.2")
	c.applyFile("base/rbac.yaml")
	c.do("POST", "/api/v1/nodes", `{apiVersion: v1, kind: Node, metadata: {name: n1}, spec: {podCIDR: 10.1.0.0/24}}`, nil)
	c.do("PATCH", "/api/v1/nodes/n1/status", `status: {addresses: [{type: InternalIP, address: 192.0.2.1}]}`, nil)
	c.do("POST", "/api/v1/namespaces/default/services", `{apiVersion: v1, kind: Service, metadata: {name: web}, spec: {clusterIP: 10.96.0.10, type: NodePort, ports: [{name: http, port: 80, nodePort: 30080}]}}`, nil)
	c.do("POST", "/api/v1/namespaces/default/services", `{apiVersion: v1, kind: Service, metadata: {name: sticky}, spec: {clusterIP: 10.96.0.20, sessionAffinity: ClientIP, ports: [{name: http, port: 80}]}}`, nil)
	c.do("POST", slicesPath, endpoints("sticky", podIPs[0]+" n1", podIPs[1]+" n1", podIPs[2]+" n1"), nil)
	c.do("POST", slicesPath, endpoints("web", podIPs[0]+" n1"), nil)
	last := podIPs[0]
	// roll replaces the endpoint of web.
	roll := func() {
		last = map[string]string{podIPs[0]: podIPs[1], podIPs[1]: podIPs[2], podIPs[2]: podIPs[0]}[last]
		c.do("PUT", slicesPath+"/web-1", endpoints("web", last+" n1"), nil)
	}
	served := func(what string) {
		t.Helper()
		eventually(t, what, func() bool {
			return lab.Visits(s.Client, "", clusterVIP, 5).Answered(last) && lab.Visits(s.Client, "", nodePort, 5).Answered(last)
		})
	}
	kubeProxy := func(t *testing.T, mode string, flags ...string) (stop func()) {
		t.Helper()
		var log bytes.Buffer
		cmd := exec.Command(path, append([]string{
			"--kubeconfig", c.Kubeconfig(), "--hostname-override", "n1", "--proxy-mode", mode, "--cluster-cidr", "10.1.0.0/16",
			"--conntrack-max-per-core", "0", "--conntrack-min", "0", "--conntrack-tcp-timeout-established", "0s", "--conntrack-tcp-timeout-close-wait", "0s",
		}, flags...)...)
		cmd.Stdout, cmd.Stderr = &log, &log
		must.Do(t, s.Node.Start(cmd))
		t.Cleanup(func() {
			cmd.Process.Kill()
			cmd.Wait()
			if t.Failed() {
				t.Logf("kube-proxy's log:\n%s", &log)
			}
		})
		// /healthz answers 200 before the rules are in effect.
		eventually(t, "kube-proxy has written its rules", func() bool {
			if mode == "nftables" {
				return rules(t, s.Node)["kube-proxy nftables"]
			}
			text, _ := s.Node.Run(t, "iptables-save")
			return strings.Contains(text, "-A KUBE-SERVICES -d 10.96.0.10/32 ") && !strings.Contains(text, "-j KUBE-CLUSTER-IPS")
		})
		return func() {
			cmd.Process.Signal(syscall.SIGTERM)
			cmd.Wait()
		}
	}
	sticky := func(t *testing.T) map[string]string {
		t.Helper()
		out := map[string]string{}
		for _, from := range clients {
			name, _, err := lab.Visit(s.Client, from, "10.96.0.20:80")
			if err != nil {
				t.Fatal(err)
			}
			out[from] = name
		}
		return out
	}
	for _, from := range []string{"nftables", "iptables"} {
		for _, to := range []string{"nftables", "iptables"} {
			var flags []string
			ports := "default"
			if from == "iptables" {
				// In mode nftables it is known by its ports that kube-proxy shares nothing with mode iptables.
				ports, flags = "moved", []string{"--metrics-bind-address", "127.0.0.1:20249", "--healthz-bind-address", "0.0.0.0:20256"}
			}
			t.Run(fmt.Sprintf("from=%s/to=%s/ports=%s", from, to, ports), func(t *testing.T) {
				stop := kubeProxy(t, from, flags...)
				served("kube-proxy serves")
				before := sticky(t)
				stream := s.stream()
				stream.Next(20)
				p := start(t, s.Node, "run", "--kubeconfig", c.Kubeconfig(), "--hostname-override", "n1", "--proxy-mode", to, "--cluster-cidr", "10.1.0.0/16",
					"--adopt-from-kube-proxy", "--min-sync-period", "0s")
				if from == to && to == "iptables" {
					p.logged(t, "kube-proxy runs and writes the same rules")
				} else {
					p.line(t)
					p.logged(t, "another proxy runs")
				}
				held(t, stream, "when the agent has started")
				for range 3 {
					roll()
					served("both serve")
					held(t, stream, "when both serve")
				}
				stop()
				held(t, stream, "when kube-proxy has ended")
				roll()
				if from == to && to == "iptables" {
					p.line(t)
				}
				served("the agent serves")
				eventually(t, "kube-proxy's rules are gone", func() bool {
					got := rules(t, s.Node)
					return !got["kube-proxy nftables"] && (to == "iptables" || !got["iptables"])
				})
				if now := sticky(t); !maps.Equal(before, now) {
					t.Errorf("clients with affinity: %v, before %v", now, before)
				}
				held(t, stream, "at the take-over")
				// The way back. kube-proxy's nftables mode deletes the chains of mode iptables
				// when it starts, before its own rules are in effect.
				if from == "nftables" && to == "iptables" {
					p.stop(t)
					p = start(t, s.Node, "run", "--kubeconfig", c.Kubeconfig(), "--hostname-override", "n1", "--cluster-cidr", "10.1.0.0/16")
					p.line(t)
					eventually(t, "mode iptables is gone", func() bool { return !rules(t, s.Node)["iptables"] })
					held(t, stream, "in mode nftables")
				}
				p.stop(t)
				stop = kubeProxy(t, from, flags...)
				held(t, stream, "when kube-proxy has started again")
				cleanup(t, s.Node)
				held(t, stream, "after --cleanup")
				roll()
				served("kube-proxy serves again")
				held(t, stream, "at the end")
				stream.Stop()
				stop()
				if code, _, log := verb(t, s.Node, "run", "--cleanup", "--adopt-from-kube-proxy"); code != 0 {
					t.Errorf("--cleanup of kube-proxy: exit status %d, log:\n%s", code, log)
				}
			})
		}
	}
}
