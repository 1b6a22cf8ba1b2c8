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

// TestTakeOverFromKubeProxy takes the Service web over from kube-proxy, or from nodeproxy in another mode.
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
		{"nodeproxy nftables", "iptables", "default ports"},
		{"nodeproxy iptables", "nftables", "default ports"},
	} {
		t.Run(fmt.Sprintf("from=%s/to=%s/%s", tt.from, tt.to, tt.seen), func(t *testing.T) {
			t.Parallel()
			takeOver(t, tt.from, tt.to, tt.seen)
		})
	}
}

// takeOver takes the Service web, with client affinity unless it is from mode ipvs, over from a mode of
// kube-proxy, or of nodeproxy. One that runs answers at the default ports, at those of the agent's own
// configuration, or only its process can be seen. One that has ended left its rules. In the usual order the
// agent starts, the other ends, and then all endpoints are replaced. Connections are opened all the time, one
// stays open, and each client keeps the endpoint that the other chose for it.
func takeOver(t *testing.T, from, to, seen string) {
	t.Helper()
	other, runs := "kube-proxy", seen != "ended"
	if mode, ok := strings.CutPrefix(from, "nodeproxy "); ok {
		other, from = "nodeproxy", mode
	}
	waits := runs && other == "kube-proxy" && (from == to && to == "iptables" || from == "ipvs" && to != "nftables")
	s, dir, service := newSite(t), t.TempDir(), stickyService
	var clients []string
	open, flags := s.stream, []string{"--metrics-bind-address", "127.0.0.1:10250", "--adopt-from-kube-proxy"}
	var left []string // what traces must list after the end
	if from == "ipvs" {
		service, open = webService, func() *lab.Stream { return briefStream(t, s) }
		flags = append(flags, "--cluster-cidr", "10.1.0.0/16")
	} else {
		clients = s.manyClients()
	}
	objects := func(ips ...string) { put(t, dir, "web.yaml", service+"---\n"+webSlice(ips...)) }
	if from == "ipvs" && to != "nftables" && !runs {
		objects(podIPs[2])
		fresh := newSite(t)
		p := embed(t, fresh.Node, agentArgs(dir, to, flags...)...)
		p.synced(t, "services=1 endpoints=1 changed=1")
		p.stop(t)
		left = traces(t, fresh.Node)
	}
	objects(podIPs[:2]...)

	var follow func(ips ...string) // has the other proxy write its rules again, for endpoints
	var end func()
	run := embed
	if other == "nodeproxy" {
		flags[2] = "--conntrack-tcp-be-liberal"
		p := embed(t, s.Node, agentArgs(dir, from)...)
		p.synced(t, "services=1 endpoints=2 changed=1")
		follow = func(ips ...string) { p.synced(t, fmt.Sprintf("services=1 endpoints=%d changed=1", len(ips))) }
		end = func() { p.stop(t) }
	} else {
		p := startKubeProxy(t, s.Node, from, seen == "default ports", podIPs[:2]...)
		follow, end = p.sync, p.stop
		switch seen {
		case "own configuration":
			flags[1] = "127.0.0.1:20249"
			p.serve(flags[1], from)
			flags = append(flags, "--healthz-bind-address", "0.0.0.0:20256")
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
			run = start // the agent does not count its children
		}
	}
	metrics := flags[1]
	before := s.chosen(t, clients)
	long := talk(t, s.Client, nodePort)
	if again := s.chosen(t, clients); !maps.Equal(before, again) {
		t.Fatalf("the other proxy's rules have no affinity: %v, then %v", before, again)
	}
	stream := open()
	stream.Next(20)
	keep := func(when string) {
		t.Helper()
		held(t, stream, when)
		// Mode iptables does not read the affinity of nodeproxy's mode nftables.
		if now := s.chosen(t, clients); !maps.Equal(before, now) && (other == "kube-proxy" || from == "iptables") {
			t.Errorf("%s: %v, before %v", when, now, before)
		}
	}
	if from == "ipvs" && to == "nftables" && !runs {
		// Without the flag kube-proxy's state stays.
		was := traces(t, s.Node)
		p := embed(t, s.Node, agentArgs(dir, to, "--cluster-cidr", "10.1.0.0/16")...)
		p.synced(t, "services=1 endpoints=2 changed=1")
		held(t, stream, "without the flag")
		p.stop(t)
		if now := traces(t, s.Node); !slices.Equal(now, was) {
			t.Errorf("changed without the flag:\n%s", difference(now, was))
		}
	}
	was := rules(t, s.Node)
	p := run(t, s.Node, agentArgs(dir, to, flags...)...)
	if waits {
		p.logged(t, "kube-proxy runs and writes the same rules")
		if now := rules(t, s.Node); !maps.Equal(now, was) {
			t.Errorf("rules while kube-proxy runs: %v, before %v", now, was)
		}
	} else {
		p.synced(t, "services=1 endpoints=2 changed=1")
	}
	if runs {
		if code, _, _ := get(t, s.Node, "http://127.0.0.1:10256/readyz"); code == 200 && other == "kube-proxy" {
			t.Error("kube-proxy's port answers as the agent's")
		}
		keep("when both run")
		// Both follow changes, and the other proxy writes its rules again.
		objects(podIPs...)
		follow(podIPs...)
		if !waits {
			p.logged(t, fmt.Sprintf(`another proxy runs: its rules are removed when it has ended" proxy=%q mode=%q`, other, from))
			p.synced(t, "services=1 endpoints=3 changed=1")
			s.explains(t, dir, to, 1, fmt.Sprintf("kernel: rules of %s's mode %s are there, too, and may take this packet first", other, from))
			if !strings.Contains(metricsOn(t, s.Node, metrics), fmt.Sprintf(`proxier_other_proxy_rules{mode=%q,proxy=%q,state="in-use"} 1`, from, other)) {
				t.Error("no metric of the other proxy's rules")
			}
		}
		keep("after a change while both run")
		end()
		if waits {
			p.synced(t, "services=1 endpoints=3 changed=1")
			p.logged(t, "kube-proxy has ended")
		}
	}
	eventually(t, "the other proxy's rules are gone", func() bool {
		got := rules(t, s.Node)
		return !got["kube-proxy nftables"] && (to == "nftables" || !got["nftables"]) && (to == "iptables" || from == "ipvs" || !got["iptables"])
	})
	keep("when the other proxy has ended")
	if got, want := strings.Contains(p.log(), "conntrack.tcpBeLiberal"), from == "iptables" && to == "nftables" && other == "kube-proxy"; got != want {
		t.Errorf("the log has a warning about invalid packets: %v, want %v", got, want)
	}
	objects(podIPs[2])
	p.synced(t, "services=1 endpoints=1 changed=1")
	s.answeredBy(t, clusterVIP, podIPs[2])
	s.answeredBy(t, nodePort, podIPs[2])
	held(t, stream, "at the end")
	stream.Stop()
	if _, _, err := long.Ask(); err != nil {
		t.Errorf("the old connection: %v", err)
	}
	reset(long)
	if from == "ipvs" {
		p.logged(t, `"removing the rules of a proxy that has ended" proxy="kube-proxy" mode="ipvs"`)
		if strings.Contains(p.log(), `proxy="kube-proxy" mode="iptables"`) {
			t.Errorf("kube-proxy's mode was ipvs, log:\n%s", p.log())
		}
	}
	if from != "ipvs" || !runs {
		eventually(t, "the metric of the other proxy's rules is gone", func() bool {
			return !strings.Contains(metricsOn(t, s.Node, metrics), "proxier_other_proxy_rules{")
		})
		s.explains(t, dir, to, 0, "kernel: agrees")
	}
	if from == "ipvs" && !runs {
		eventually(t, "the agent's own rules are left", func() bool { return slices.Equal(traces(t, s.Node), left) })
	}
	if code, _ := p.stop(t); code != 0 {
		t.Errorf("exit status %d", code)
	}
	if (!runs || seen == "process") && p.loggedErrors() { // otherwise the other proxy has the ports
		t.Errorf("log:\n%s", p.log())
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

// TestRulesOfRunningKubeProxyStay gives the Service web back in each mode.
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
				giveBack(t, from, to)
			})
		}
	}
}

// giveBack starts a kube-proxy beside a running agent, which holds the ports, ends the agent and cleans up. In
// TestRehearsal the agent ends first.
func giveBack(t *testing.T, from, to string) {
	t.Helper()
	s := newSite(t)
	p := s.serveWeb(t, podIPs[:1], "--proxy-mode", from, "--adopt-from-kube-proxy")
	open := s.stream
	if to == "ipvs" {
		open = func() *lab.Stream { return briefStream(t, s) }
	}
	stream := open()
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

// manyClients gives the client 24 more addresses.
func (s *site) manyClients() (out []string) {
	for i := range 24 {
		out = append(out, fmt.Sprintf("192.0.2.%d", 100+i))
		s.Client.Addrs("eth0", out[i]+"/24")
	}
	return out
}

// talk opens a connection that stays open until the end of the test.
func talk(t *testing.T, h *netlab.Host, to string) *lab.Talk {
	t.Helper()
	c := must.Get(lab.Dial(h, "tcp", "", to, testtime.Timeout))(t)
	t.Cleanup(func() { c.Close() })
	_, _, err := c.Hear()
	must.Do(t, err)
	return c
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
