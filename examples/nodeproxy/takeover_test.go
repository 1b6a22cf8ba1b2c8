package main

import (
	"fmt"
	"os/exec"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/go-proxier/proxier/internal/netlab"
)

// takeOverTools skips a test where a program is missing.
func takeOverTools(t *testing.T) {
	t.Helper()
	needMode(t, "iptables")
	_, err := exec.LookPath("nft")
	netlab.Need(t, err == nil, "nft")
}

// agentArgs returns the arguments of an agent for the Service web.
func agentArgs(dir, mode string, more ...string) []string {
	return append([]string{
		"run", "--manifests", dir + "/web.yaml", "--hostname-override", "n1", "--min-sync-period", "0s", "--proxy-mode", mode,
	}, more...)
}

// rollOut replaces the endpoints of the Service web.
func rollOut(t *testing.T, dir string, ips ...string) {
	t.Helper()
	put(t, dir, "web.yaml", webService+"---\n"+webSlice(ips...))
}

// TestTakeOverFromRunningKubeProxy starts the agent while a kube-proxy runs, then ends kube-proxy,
// and then replaces all endpoints, as the usual order on a cluster does.
func TestTakeOverFromRunningKubeProxy(t *testing.T) {
	t.Parallel()
	takeOverTools(t)
	for _, from := range []string{"nftables", "iptables"} {
		for _, to := range []string{"nftables", "iptables"} {
			t.Run(fmt.Sprintf("from=%s/to=%s", from, to), func(t *testing.T) {
				t.Parallel()
				s := newSite(t)
				dir := t.TempDir()
				rollOut(t, dir, podIPs[0])
				old := startKubeProxy(t, s.node, from, true, podIPs[0])
				stream := newStream(s.client, clusterVIP, s.client, nodePort)
				stream.next(20)
				p := start(t, s.node, agentArgs(dir, to, "--adopt-from-kube-proxy", "--metrics-bind-address", "127.0.0.1:10250")...)
				waits := from == to && to == "iptables"
				if waits {
					p.logged(t, "kube-proxy runs in the same mode")
				} else {
					p.synced(t, "services=1 endpoints=1 changed=1")
					p.logged(t, "another proxy runs")
					if !strings.Contains(metricsOn(t, s.node, "127.0.0.1:10250"), fmt.Sprintf(`proxier_other_proxy_rules{mode=%q,proxy="kube-proxy",state="in-use"} 1`, from)) {
						t.Error("no metric of kube-proxy's rules")
					}
				}
				if code, _, _ := get(t, s.node, "http://127.0.0.1:10256/readyz"); code == 200 {
					t.Error("kube-proxy's port answers as the agent's")
				}
				stream.held(t, "when both run")
				if !waits {
					s.explains(t, dir, to, 1, "kernel: rules of kube-proxy's mode "+from+" are there, too, and may take this packet first")
				}
				// Both follow changes, and kube-proxy writes its rules again.
				old.sync(podIPs[1])
				rollOut(t, dir, podIPs[1])
				if !waits {
					p.synced(t, "services=1 endpoints=1 changed=1")
				}
				stream.held(t, "after a change while both run")
				s.answeredBy(t, clusterVIP, podIPs[1])
				old.stop()
				if waits {
					p.synced(t, "services=1 endpoints=1 changed=1")
				}
				stream.held(t, "when kube-proxy has ended")
				rollOut(t, dir, podIPs[2])
				p.synced(t, "services=1 endpoints=1 changed=1")
				eventually(t, "kube-proxy's rules are gone", func() bool {
					got := rules(t, s.node)
					return !got["kube-proxy nftables"] && (to == "iptables" || !got["iptables"])
				})
				s.answeredBy(t, clusterVIP, podIPs[2])
				s.answeredBy(t, nodePort, podIPs[2])
				eventually(t, "the agent's own server answers", func() bool {
					code, _, _ := get(t, s.node, "http://127.0.0.1:10256/readyz")
					return code == 200
				})
				s.explains(t, dir, to, 0, "kernel: agrees")
				stream.held(t, "at the end")
				stream.stop()
				eventually(t, "the metric of kube-proxy's rules is gone", func() bool {
					return !strings.Contains(metricsOn(t, s.node, "127.0.0.1:10250"), "proxier_other_proxy_rules{")
				})
			})
		}
	}
}

// explains checks the exit status and a line of explain about the Service web.
func (s *site) explains(t *testing.T, dir, mode string, code int, line string) {
	t.Helper()
	e := start(t, s.node, "explain", "--manifests", dir+"/web.yaml", "--hostname-override", "n1", "--proxy-mode", mode, clusterVIP)
	if got, out := e.exit(t); got != code || !slices.Contains(out, line) {
		t.Errorf("explain: exit status %d, want %d; %q in\n%s\nlog:\n%s", got, code, line, strings.Join(out, "\n"), e.log())
	}
}

// metricsOn returns the metrics at an address of a node.
func metricsOn(t *testing.T, h *netlab.Host, addr string) string {
	t.Helper()
	var text string
	eventually(t, "metrics", func() (ok bool) {
		var code int
		code, text, _ = get(t, h, "http://"+addr+"/metrics")
		return code == 200
	})
	return text
}

// TestRulesOfRunningKubeProxyStay starts a kube-proxy beside a running agent, which holds the
// ports, ends the agent and cleans up: the way back.
func TestRulesOfRunningKubeProxyStay(t *testing.T) {
	t.Parallel()
	takeOverTools(t)
	for _, from := range []string{"nftables", "iptables"} {
		for _, to := range []string{"nftables", "iptables"} {
			for _, first := range []string{"agent ends", "kube-proxy starts"} {
				t.Run(fmt.Sprintf("from=%s/to=%s/first=%s", from, to, first), func(t *testing.T) {
					t.Parallel()
					s := newSite(t)
					dir := t.TempDir()
					rollOut(t, dir, podIPs[0])
					p := start(t, s.node, agentArgs(dir, from, "--adopt-from-kube-proxy")...)
					p.synced(t, "services=1 endpoints=1 changed=1")
					stream := newStream(s.client, clusterVIP, s.client, nodePort)
					stream.next(20)
					end := func() {
						p.Process.Signal(syscall.SIGTERM)
						p.exit(t)
						stream.held(t, "when the agent has ended")
					}
					if first == "agent ends" {
						end()
					}
					now := startKubeProxy(t, s.node, to, first == "agent ends", podIPs[0])
					stream.held(t, "when kube-proxy has started")
					if first != "agent ends" {
						time.Sleep(2 * time.Second) // the agent may look at kube-proxy's rules
						now.sync(podIPs[0])
						stream.held(t, "when both run")
						end()
						now.sync(podIPs[0])
					}
					c := start(t, s.node, "run", "--cleanup")
					if code, _ := c.exit(t); code != 0 {
						t.Errorf("--cleanup: exit status %d, log:\n%s", code, c.log())
					}
					stream.held(t, "after --cleanup")
					now.sync(podIPs[1])
					stream.held(t, "after a change")
					stream.stop()
					s.answeredBy(t, clusterVIP, podIPs[1])
					s.answeredBy(t, nodePort, podIPs[1])
					text, err := s.node.Output("iptables-save")
					if err != nil {
						t.Fatal(err)
					}
					// KUBE-PROXY-LOCALNET stays, because route_localnet does, which kube-proxy may need.
					for _, own := range []string{"KUBE-CLUSTER-IPS", "KUBE-REFUSED-NODEPORTS", "as of change"} {
						if strings.Contains(text, own) {
							t.Errorf("left of the agent: %s in\n%s\nlog:\n%s", own, text, c.log())
						}
					}
				})
			}
		}
	}
}

// TestCleanupLeavesModeIPVSToRunningKubeProxy has a chain of the agent's mode ipvs, and a
// kube-proxy in that mode.
func TestCleanupLeavesModeIPVSToRunningKubeProxy(t *testing.T) {
	t.Parallel()
	takeOverTools(t)
	s := newSite(t)
	for _, args := range []string{"-N KUBE-IPVS-SERVICES"} {
		if out, err := s.node.Output("iptables", append([]string{"-t", "nat"}, strings.Fields(args)...)...); err != nil {
			t.Fatalf("%v\n%s", err, out)
		}
	}
	old := &scriptedKubeProxy{t: t, node: s.node, mode: "ipvs"}
	old.serve("127.0.0.1:10249", old.mode)
	c := start(t, s.node, "run", "--cleanup")
	if code, _ := c.exit(t); code != 1 || !strings.Contains(c.log(), "kube-proxy runs in mode ipvs") || !rules(t, s.node)["ipvs"] {
		t.Errorf("exit status %d, rules %v, log:\n%s", code, rules(t, s.node), c.log())
	}
	old.stop()
	c = start(t, s.node, "run", "--cleanup")
	if code, _ := c.exit(t); code != 0 || rules(t, s.node)["ipvs"] {
		t.Errorf("without kube-proxy: exit status %d, rules %v, log:\n%s", code, rules(t, s.node), c.log())
	}
}
