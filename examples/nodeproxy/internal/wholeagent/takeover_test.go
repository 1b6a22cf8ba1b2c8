//go:build linux

package wholeagent

import (
	"fmt"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/go-proxier/proxier/examples/nodeproxy/internal/lab"
	"github.com/go-proxier/proxier/internal/testing/must"
	"github.com/go-proxier/proxier/internal/testing/netlab"
	"github.com/go-proxier/proxier/internal/testing/testtime"
)

// takeOverTools skips a test where a program is missing.
func takeOverTools(t *testing.T) {
	t.Helper()
	needMode(t, "iptables")
	netlab.NeedPrograms(t, "nft")
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

// TestTakeOverFromKubeProxy takes a Service with client affinity over from a kube-proxy that runs, or
// that has ended and left its rules. A running one answers at the default ports, at those of the
// agent's own configuration, or only its process can be seen. In the usual order the agent starts,
// kube-proxy ends, and then all endpoints are replaced. Connections are opened all the time, one stays
// open, and each client keeps the endpoint that kube-proxy chose for it.
func TestTakeOverFromKubeProxy(t *testing.T) {
	t.Parallel()
	takeOverTools(t)
	for _, tt := range []struct{ from, to, seen string }{
		{"nftables", "nftables", "default ports"},
		{"iptables", "nftables", "default ports"},
		{"iptables", "iptables", "default ports"},
		{"iptables", "iptables", "own configuration"},
		{"iptables", "iptables", "process"},
		{"nftables", "iptables", "ended"},
		{"iptables", "iptables", "ended"},
	} {
		t.Run(fmt.Sprintf("from=%s/to=%s/%s", tt.from, tt.to, tt.seen), func(t *testing.T) {
			t.Parallel()
			s, clients, dir := stickySite(t)
			old := startKubeProxy(t, s.Node, tt.from, tt.seen == "default ports", podIPs[:2]...)
			metrics, end := "127.0.0.1:10250", old.stop
			args := agentArgs(dir, tt.to, "--adopt-from-kube-proxy")
			switch tt.seen {
			case "own configuration":
				metrics = "127.0.0.1:20249"
				old.serve(metrics, tt.from)
				args = append(args, "--healthz-bind-address", "0.0.0.0:20256")
			case "process":
				path := filepath.Join(dir, "kube-proxy")
				must.Do(t, os.Symlink("/bin/sleep", path))
				cmd := exec.Command(path, "600")
				must.Do(t, s.Node.Start(cmd))
				end = func() {
					cmd.Process.Kill()
					cmd.Wait()
				}
				t.Cleanup(func() { cmd.Process.Kill() })
			}
			before := s.chosen(t, clients)
			long := talkTo(t, s.Client, s.chosen(t, []string{"192.0.2.9"})["192.0.2.9"])
			if again := s.chosen(t, clients); !maps.Equal(before, again) {
				t.Fatalf("kube-proxy's rules of the test have no affinity: %v, then %v", before, again)
			}
			stream := s.stream()
			stream.Next(20)
			keep := func(when string) {
				t.Helper()
				held(t, stream, when)
				if now := s.chosen(t, clients); !maps.Equal(before, now) {
					t.Errorf("%s: %v, before %v", when, now, before)
				}
			}
			was := rules(t, s.Node)
			run := embed
			if tt.seen == "process" { // the agent does not count its children
				run = start
			}
			p := run(t, s.Node, append(args, "--metrics-bind-address", metrics)...)
			runs, waits := tt.seen != "ended", tt.seen != "ended" && tt.from == tt.to && tt.to == "iptables"
			if waits {
				p.logged(t, "kube-proxy runs and writes the same rules")
				if now := rules(t, s.Node); !maps.Equal(now, was) {
					t.Errorf("rules while kube-proxy runs: %v, before %v", now, was)
				}
			} else {
				p.synced(t, "services=1 endpoints=2 changed=1")
			}
			if runs {
				if code, _, _ := get(t, s.Node, "http://127.0.0.1:10256/readyz"); code == 200 {
					t.Error("kube-proxy's port answers as the agent's")
				}
				keep("when both run")
				// Both follow changes, and kube-proxy writes its rules again.
				old.sync(podIPs...)
				put(t, dir, "web.yaml", stickyService+"---\n"+webSlice(podIPs...))
				if !waits {
					p.logged(t, "another proxy runs")
					p.synced(t, "services=1 endpoints=3 changed=1")
					s.explains(t, dir, tt.to, 1, "kernel: rules of kube-proxy's mode "+tt.from+" are there, too, and may take this packet first")
					if !strings.Contains(metricsOn(t, s.Node, metrics), fmt.Sprintf(`proxier_other_proxy_rules{mode=%q,proxy="kube-proxy",state="in-use"} 1`, tt.from)) {
						t.Error("no metric of kube-proxy's rules")
					}
				}
				keep("after a change while both run")
				end()
				if waits {
					p.synced(t, "services=1 endpoints=3 changed=1")
					p.logged(t, "kube-proxy has ended")
				}
			}
			eventually(t, "kube-proxy's rules are gone", func() bool {
				got := rules(t, s.Node)
				return !got["kube-proxy nftables"] && (tt.to == "iptables" || !got["iptables"])
			})
			keep("when kube-proxy has ended")
			if got, want := strings.Contains(p.log(), "conntrack.tcpBeLiberal"), tt.from == "iptables" && tt.to == "nftables"; got != want {
				t.Errorf("the log has a warning about invalid packets: %v, want %v", got, want)
			}
			put(t, dir, "web.yaml", stickyService+"---\n"+webSlice(podIPs[2]))
			p.synced(t, "services=1 endpoints=1 changed=1")
			s.answeredBy(t, clusterVIP, podIPs[2])
			s.answeredBy(t, nodePort, podIPs[2])
			s.explains(t, dir, tt.to, 0, "kernel: agrees")
			held(t, stream, "at the end")
			stream.Stop()
			if _, _, err := long.Ask(); err != nil {
				t.Errorf("the old connection: %v", err)
			}
			eventually(t, "the metric of kube-proxy's rules is gone", func() bool {
				return !strings.Contains(metricsOn(t, s.Node, metrics), "proxier_other_proxy_rules{")
			})
			if code, _ := p.stop(t); code != 0 {
				t.Errorf("exit status %d", code)
			}
			if (!runs || tt.seen == "process") && p.loggedErrors() { // otherwise kube-proxy has the ports
				t.Errorf("log:\n%s", p.log())
			}
		})
	}
}

// TestTwoAgentsOfDifferentModes starts the agent in another mode while one runs, which holds the
// ports, and then ends the first one.
func TestTwoAgentsOfDifferentModes(t *testing.T) {
	t.Parallel()
	takeOverTools(t)
	for from, to := range map[string]string{"nftables": "iptables", "iptables": "nftables"} {
		t.Run(fmt.Sprintf("from=%s/to=%s", from, to), func(t *testing.T) {
			t.Parallel()
			s, clients, dir := stickySite(t)
			old := embed(t, s.Node, agentArgs(dir, from)...)
			old.synced(t, "services=1 endpoints=2 changed=1")
			before := s.chosen(t, clients)
			stream := s.stream()
			stream.Next(20)
			p := embed(t, s.Node, agentArgs(dir, to, "--conntrack-tcp-be-liberal")...)
			p.synced(t, "services=1 endpoints=2 changed=1")
			if now := s.chosen(t, clients); from == "iptables" && !maps.Equal(before, now) {
				t.Errorf("endpoints of clients: %v, before %v", now, before)
			}
			p.logged(t, `another proxy runs: its rules are removed when it has ended" proxy="nodeproxy" mode="`+from+`"`)
			held(t, stream, "when both run")
			s.explains(t, dir, to, 1, "kernel: rules of nodeproxy's mode "+from+" are there, too, and may take this packet first")
			rollOut(t, dir, podIPs[1])
			old.synced(t, "services=1 endpoints=1 changed=1")
			p.synced(t, "services=1 endpoints=1 changed=1")
			held(t, stream, "after a change while both run")
			s.answeredBy(t, clusterVIP, podIPs[1])
			if got := rules(t, s.Node); !got[from] || !got[to] {
				t.Errorf("while both run: %v", got)
			}
			old.stop(t)
			held(t, stream, "when the first has ended")
			rollOut(t, dir, podIPs[2])
			p.synced(t, "services=1 endpoints=1 changed=1")
			eventually(t, "the first agent's rules are gone", func() bool { return !rules(t, s.Node)[from] })
			s.answeredBy(t, clusterVIP, podIPs[2])
			s.answeredBy(t, nodePort, podIPs[2])
			held(t, stream, "at the end")
			stream.Stop()
			s.explains(t, dir, to, 0, "kernel: agrees")
			if strings.Contains(p.log(), "considers invalid") {
				t.Errorf("a warning about invalid packets that are valid:\n%s", p.log())
			}
		})
	}
}

// explains checks the exit status and a line of explain about the Service web.
func (s *site) explains(t *testing.T, dir, mode string, code int, line string) {
	t.Helper()
	got, out, log := verb(t, s.Node, "explain", "--manifests", dir+"/web.yaml", "--hostname-override", "n1", "--proxy-mode", mode, clusterVIP)
	if got != code || !slices.Contains(out, line) {
		t.Errorf("explain: exit status %d, want %d; %q in\n%s\nlog:\n%s", got, code, line, strings.Join(out, "\n"), log)
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
// ports, ends the agent and cleans up: the way back. In TestTakeOverFromRealKubeProxy the agent ends first.
func TestRulesOfRunningKubeProxyStay(t *testing.T) {
	t.Parallel()
	takeOverTools(t)
	for _, from := range []string{"nftables", "iptables"} {
		for _, to := range []string{"nftables", "iptables"} {
			if from != to && !testtime.Thorough() {
				continue
			}
			t.Run(fmt.Sprintf("from=%s/to=%s", from, to), func(t *testing.T) {
				t.Parallel()
				s := newSite(t)
				p := s.serveWeb(t, podIPs[:1], "--proxy-mode", from, "--adopt-from-kube-proxy")
				stream := s.stream()
				stream.Next(20)
				now := startKubeProxy(t, s.Node, to, false, podIPs[0])
				held(t, stream, "when kube-proxy has started")
				time.Sleep(2 * time.Second) // the agent may look at kube-proxy's rules
				now.sync(podIPs[0])
				held(t, stream, "when both run")
				p.stop(t)
				held(t, stream, "when the agent has ended")
				now.sync(podIPs[0])
				cleanup(t, s.Node)
				held(t, stream, "after --cleanup")
				now.sync(podIPs[1])
				held(t, stream, "after a change")
				stream.Stop()
				s.answeredBy(t, clusterVIP, podIPs[1])
				s.answeredBy(t, nodePort, podIPs[1])
				text := must.Get(s.Node.Run(t, "iptables-save"))(t)
				// KUBE-PROXY-LOCALNET stays, because route_localnet does, which kube-proxy may need.
				for _, own := range []string{"KUBE-CLUSTER-IPS", "KUBE-REFUSED-NODEPORTS", "as of change"} {
					if strings.Contains(text, own) {
						t.Errorf("left of the agent: %s in\n%s\nlog:\n%s", own, text, p.log())
					}
				}
			})
		}
	}
}

// TestCleanupLeavesSharedObjectsToKubeProxysModeIPVS has a chain of the agent's mode ipvs, or the rules
// of its mode iptables, and a kube-proxy in mode ipvs. In one case the configuration names its port.
func TestCleanupLeavesSharedObjectsToKubeProxysModeIPVS(t *testing.T) {
	t.Parallel()
	takeOverTools(t)
	for mode, at := range map[string]string{"ipvs": "127.0.0.1:10249", "iptables": "127.0.0.1:20249"} {
		t.Run(mode, func(t *testing.T) {
			t.Parallel()
			s := newSite(t)
			if mode == "ipvs" {
				must.Get(s.Node.Run(t, "iptables", "-t", "nat", "-N", "KUBE-IPVS-SERVICES"))(t)
			} else {
				dir := t.TempDir()
				rollOut(t, dir, podIPs[0])
				p := embed(t, s.Node, agentArgs(dir, mode)...)
				p.synced(t, "services=1 endpoints=1 changed=1")
				p.stop(t)
				must.Get(s.Node.Run(t, "ip", "link", "add", "kube-ipvs0", "type", "veth", "peer", "name", "other"))(t)
			}
			old := &scriptedKubeProxy{t: t, node: s.Node, mode: "ipvs"}
			old.serve(at, old.mode)
			code, _, log := verb(t, s.Node, "run", "--cleanup", "--metrics-bind-address", at)
			if code != 1 || !strings.Contains(log, "rules of mode "+mode+" stay: kube-proxy runs, and its mode ipvs uses the same") || !rules(t, s.Node)[mode] {
				t.Errorf("exit status %d, rules %v, log:\n%s", code, rules(t, s.Node), log)
			}
			old.stop()
			if code, _, log = verb(t, s.Node, "run", "--cleanup", "--metrics-bind-address", at); code != 0 || rules(t, s.Node)[mode] {
				t.Errorf("without kube-proxy: exit status %d, rules %v, log:\n%s", code, rules(t, s.Node), log)
			}
		})
	}
}

// stickyService is the Service web with client affinity.
var stickyService = strings.Replace(webService, "spec:\n", "spec:\n  sessionAffinity: ClientIP\n", 1)

// stickySite returns a site with the addresses of 24 clients, and the folder of stickyService with two
// endpoints.
func stickySite(t *testing.T) (s *site, clients []string, dir string) {
	t.Helper()
	s = newSite(t)
	for i := range 24 {
		clients = append(clients, fmt.Sprintf("192.0.2.%d", 100+i))
		s.Client.Addrs("eth0", clients[i]+"/24")
	}
	dir = t.TempDir()
	put(t, dir, "web.yaml", stickyService+"---\n"+webSlice(podIPs[:2]...))
	return s, clients, dir
}

// chosen returns the endpoint that answers each client.
func (s *site) chosen(t *testing.T, clients []string) map[string]string {
	t.Helper()
	out := map[string]string{}
	for _, c := range clients {
		name, _, err := lab.Visit(s.Client, c, clusterVIP)
		if err != nil {
			t.Fatal(err)
		}
		out[c] = name
	}
	return out
}
