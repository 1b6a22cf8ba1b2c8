//go:build linux

package wholeagent

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/go-proxier/proxier/examples/internal/node/tuning"
	"github.com/go-proxier/proxier/examples/nodeproxy/internal/lab"
	"github.com/go-proxier/proxier/internal/testing/must"
	"github.com/go-proxier/proxier/internal/testing/netlab"
	"github.com/go-proxier/proxier/internal/testing/testtime"
)

// flagChecks holds for flags and fields of the configuration what they do.
var flagChecks = map[string]func(t *testing.T, s *site){
	// Without a Node and a default route, all of the node's addresses serve NodePorts.
	"nodePortAddresses: primary": func(t *testing.T, s *site) {
		s.serveWeb(t, podIPs, "--sync-period", "1s")
		s.answeredBy(t, nodePort, podIPs...)
		serves := func() bool { // the node, but not the source address of its default route
			c, err := lab.Dial(s.pods, "tcp", "", "10.1.0.1:30080", testtime.Timeout)
			if err == nil {
				c.Close()
			}
			return err == nil
		}
		if serves() {
			t.Error("another address answers")
		}
		must.Do(t, s.Node.Do(func() error {
			_, all, err := net.ParseCIDR("0.0.0.0/0")
			return cmp.Or(err, netlink.RouteDel(&netlink.Route{Dst: all}))
		}))
		eventually(t, "all of the node's addresses serve NodePorts", serves)
	},
	// The manifests are a single file with the Node.
	"detectLocalMode: NodeCIDR": func(t *testing.T, s *site) {
		file := filepath.Join(t.TempDir(), "all")
		with := func(addr, cidr string) {
			put(t, filepath.Dir(file), "all", fmt.Sprintf("apiVersion: v1\nkind: Node\nmetadata: {name: n1}\nspec: {podCIDR: %s}\nstatus: {addresses: [{type: InternalIP, address: %s}]}\n---\n", cidr, addr)+
				webService+"---\n"+webSlice(podIPs[0]))
		}
		with("10.1.0.1", "10.1.0.0/24")
		p := embed(t, s.Node, "run", "--manifests", file, "--hostname-override", " N1", "--detect-local-mode", "NodeCIDR", "--min-sync-period", "0s")
		p.synced(t, "services=1 endpoints=1 changed=1")
		if _, _, err := lab.VisitSoon(s.Client, "", nodePort); err == nil {
			t.Error("the NodePort answers at an address that is not the Node's")
		}
		// The client is not a pod, so its connection is masqueraded.
		if _, source, err := lab.Visit(s.Client, "", clusterVIP); err != nil || source != "10.1.0.1" {
			t.Errorf("the pod sees %q, error %v", source, err)
		}
		with("192.0.2.1", "10.1.0.0/24")
		p.synced(t, "services=1 endpoints=1 changed=0")
		s.answeredBy(t, nodePort, podIPs[0])
		with("192.0.2.1", "10.1.0.0/25")
		if code, rest := p.exit(t); code != 1 || len(rest) != 0 || !strings.Contains(p.log(), "podCIDRs changed: restart needed") {
			t.Errorf("exit status %d, lines %q, log:\n%s", code, rest, p.log())
		}
	},
	// Beside an agent that has the ports, one with the field changes no rule, and one without it retries.
	"bindAddressHardFail": func(t *testing.T, s *site) {
		const taken = "192.0.2.1:10249"
		first := s.serveWeb(t, podIPs[:1], "--metrics-bind-address", taken)
		listing := func() string {
			t.Helper()
			return must.Get(s.Node.Run(t, "nft", "--stateless", "--handle", "list", "ruleset"))(t)
		}
		was, dir := listing(), t.TempDir()
		rollOut(t, dir, podIPs[1])
		args := []string{"run", "--manifests", dir, "--hostname-override", "n1"}
		for flags, want := range map[string]string{
			"--metrics-bind-address 192.0.2.1:10248":                                      "healthz at 0.0.0.0:10256",
			"--metrics-bind-address " + taken + " --healthz-bind-address 192.0.2.1:10255": "metrics at " + taken,
		} {
			code, out, log := verb(t, s.Node, append(append(args, "--bind-address-hard-fail"), strings.Fields(flags)...)...)
			if code != 1 || len(out) != 0 || !strings.Contains(log, want) || !strings.Contains(log, "address already in use") {
				t.Errorf("%s: exit status %d, output %q, log:\n%s", flags, code, out, log)
			}
		}
		if now := listing(); now != was {
			t.Errorf("the rules changed from\n%s\nto\n%s", was, now)
		}
		s.answeredBy(t, clusterVIP, podIPs[0])
		p := embed(t, s.Node, append(args, "--metrics-bind-address", taken, "--readyz-bind-address", "127.0.0.1:10266")...)
		p.synced(t, "services=1 endpoints=1 changed=1")
		p.logged(t, "a server failed and will be restarted")
		eventually(t, "/readyz does not need the ports", status(t, s.Node, "http://127.0.0.1:10266/readyz", 200))
		first.stop(t)
		p.logged(t, "the server listens")
		eventually(t, "metrics are served when the port is free", status(t, s.Client, "http://"+taken+"/metrics", 200))
	},
	// As in a container, the limit of connections cannot be set. It is only raised. The agent serves, and
	// logs the flag that leaves the parameter alone. --init-only fails, unless the DaemonSet's comment is followed.
	"conntrack": func(t *testing.T, s *site) {
		const more = "--conntrack-min=2000000000"
		p := s.serveWeb(t, podIPs[:1], more)
		_, err := s.Node.Output("test", "-e", "/proc/sys/net/netfilter/nf_conntrack_max")
		netlab.Need(t, err == nil, "nf_conntrack sysctls in network namespaces")
		for _, want := range []string{"] \"cannot set a kernel parameter\"", "/proc/sys/net/netfilter/nf_conntrack_max is ", "cannot be set to ", "set it on the host, or ask for no change", `skipWith="--conntrack-max-per-core=0"`} {
			p.logged(t, want)
		}
		s.answeredBy(t, clusterVIP, podIPs[0])
		const kind = "conntrack: {maxPerCore: 0}"
		if text := string(must.Get(os.ReadFile("../../deploy/base/daemonset.yaml"))(t)); !strings.Contains(text, kind) {
			t.Errorf("the comment does not name %s", kind)
		}
		base, dir := string(must.Get(os.ReadFile("../../deploy/base/config.yaml"))(t)), t.TempDir()
		for setting, want := range map[string]int{kind: 0, "conntrack: {min: 2000000000}": 1} {
			put(t, dir, "config.yaml", base+setting+"\n")
			code, _, log := verb(t, s.Node, "run", "--init-only", "--config", dir+"/config.yaml")
			if code != want || (want == 0) == strings.Contains(log, "nf_conntrack_max") {
				t.Errorf("%s: exit status %d, want %d, log:\n%s", setting, code, want, log)
			}
		}
	},
	// The limit is that of all CPUs of the machine, even for a process that is pinned to one.
	"conntrack.maxPerCore": func(t *testing.T, _ *site) {
		online := strings.Count("\n"+string(must.Get(os.ReadFile("/proc/cpuinfo"))(t)), "\nprocessor\t:")
		netlab.Need(t, online > 1, "two CPUs")
		share := tuning.MaxEntries / online // more than most limits, which are only raised
		var affinity unix.CPUSet
		must.Do(t, unix.SchedGetaffinity(0, &affinity))
		cpu := 0
		for !affinity.IsSet(cpu) {
			cpu++
		}
		cmd := netlab.Command(t, "taskset", "-c", fmt.Sprint(cpu), testBinary(t), "run", "--init-only", fmt.Sprintf("--conntrack-max-per-core=%d", share), "--conntrack-min=0",
			"--conntrack-tcp-timeout-established=0", "--conntrack-tcp-timeout-close-wait=0")
		cmd.Env = append(os.Environ(), programEnv+"=1")
		out, _ := cmd.CombinedOutput() // in the tests' namespace the limit cannot be set
		const sysctl = "/proc/sys/net/netfilter/nf_conntrack_max"
		_, err := os.Stat(sysctl)
		netlab.Need(t, err == nil, "nf_conntrack sysctls in network namespaces")
		contains(t, string(out), sysctl+" is ", fmt.Sprintf("cannot be set to at least %d ", online*share))
	},
	// An agent without an API server does not change existing rules, and has all metrics of the client.
	"--master": func(t *testing.T, s *site) {
		s.serveWeb(t, podIPs[:1]).stop(t)
		for _, mode := range []string{"ClusterCIDR", "NodeCIDR"} {
			p := start(t, s.Node, "run", "--master", "http://192.0.2.1:1", "--hostname-override", "n1", "--detect-local-mode", mode, "--metrics-bind-address", "192.0.2.1:10249")
			p.logged(t, "connection refused")
			s.answeredBy(t, clusterVIP, podIPs[0])
			for mode == "ClusterCIDR" {
				text := metricsOn(t, s.Client, "192.0.2.1:10249")
				if !strings.Contains(text, "rest_client_requests_total{") {
					continue // no request has ended
				}
				served := parseMetrics(t, text)
				for _, f := range processMetrics() {
					if served[f.name] == nil {
						t.Errorf("%s is missing", f.name)
						continue
					}
					f.check(t, served[f.name])
				}
				break
			}
			if code, rest := p.stop(t); code != 0 || len(rest) != 0 {
				t.Errorf("%s: exit status %d, lines %q, log:\n%s", mode, code, rest, p.log())
			}
		}
	},
	"--service-traffic-metrics": inModes(func(t *testing.T, s *site, mode string) {
		const labels = `{ip_family="IPv4",port="http",protocol="TCP",service="web",service_namespace="default"} `
		flags := []string{"--proxy-mode", mode, "--metrics-bind-address", metricsAt, "--service-traffic-metrics"}
		p, made := s.serveWeb(t, podIPs, flags...), 0
		counts := func(connections, endpoints int) {
			t.Helper()
			if y := lab.Visits(s.Client, "", clusterVIP, connections); len(y.Errs) != 0 {
				t.Error(y)
			}
			made += connections
			s.page(t, "/metrics", fmt.Sprint("\nproxier_service_connections_total", labels, made, "\n"), fmt.Sprint("\nproxier_service_endpoints", labels, endpoints, "\n"))
		}
		counts(0, 3)
		counts(5, 3)
		p.web(t, podIPs[:2]...)
		counts(2, 2)
		p.stop(t)
		p = s.serveWeb(t, podIPs[:2], flags...)
		counts(1, 2) // the kernel has the earlier ones
		p.web(t)
		counts(0, 0)
		if mode == "nftables" {
			s.page(t, "/metrics", "\nproxier_service_refused_packets_total"+labels+"0\n")
			s.refused(t, clusterVIP)
			s.page(t, "/metrics", "\nproxier_service_refused_packets_total"+labels+"1\n")
		}
	}),
	// A pod falls silent and vanishes. The connections of a client end, others stay. Nothing is left of the
	// flag in a run without it and after --cleanup. Package reset tests the rest.
	"--reset-connections-of-vanished-endpoints": inModes(func(t *testing.T, s *site, mode string) {
		netlab.NeedPrograms(t, "nft")
		const flag = "--reset-connections-of-vanished-endpoints="
		flags := []string{"--proxy-mode", mode, "--metrics-bind-address", metricsAt}
		p := s.serveWeb(t, podIPs, append(flags, flag+"100ms")...)
		gone, stays := talkTo(t, s.Client, podIPs[0]), talkTo(t, s.Client, podIPs[1])
		must.Get(s.pods.Run(t, "nft", "add table ip test; add chain ip test in { type filter hook prerouting priority -300; }; add rule ip test in ip daddr "+podIPs[0]+" drop"))(t)
		p.web(t, podIPs[1:]...)
		p.logged(t, "ending connections to vanished endpoints")
		if _, _, err := gone.Ask(); !errors.Is(err, unix.ECONNRESET) {
			t.Errorf("a client of the pod that vanished: %v, want a reset", err)
		}
		if name, _, err := stays.Ask(); name != podIPs[1] || err != nil {
			t.Errorf("a client of another pod: %q, %v", name, err)
		}
		s.page(t, "/metrics", "\nproxier_vanished_endpoints_total 1\n", "\nproxier_vanished_endpoints_destroyed_sockets_total ")
		hasTable := func() bool {
			t.Helper()
			return strings.Contains(must.Get(s.Node.Run(t, "nft", "list tables"))(t), "proxier-reset")
		}
		if !hasTable() {
			t.Error("no table proxier-reset")
		}
		p.stop(t)
		p = s.serveWeb(t, podIPs, flags...)
		eventually(t, "a run without the flag removes the table", func() bool { return !hasTable() })
		p.stop(t)
		s.serveWeb(t, podIPs, append(flags, flag+"1h")...).stop(t)
		if !hasTable() {
			t.Fatal("no table proxier-reset before --cleanup")
		}
		if cleanup(t, s.Node); hasTable() {
			t.Error("--cleanup leaves the table")
		}
	}),
	// The pages beside the metrics. Those about iptables are compared with the kernel.
	"--metrics-bind-address": func(t *testing.T, s *site) {
		needMode(t, "iptables")
		p := s.serveWeb(t, podIPs, "--proxy-mode", "iptables", "--metrics-bind-address", metricsAt)
		rules := func(table string) int {
			t.Helper()
			text := must.Get(s.Node.Run(t, "iptables-save", "-t", table))(t)
			return strings.Count(text, "\n-A KUBE-") - strings.Count(text, "\n-A KUBE-PROXY-CANARY ")
		}
		metric := func(name, table string, value int) string {
			return fmt.Sprintf("\nkubeproxy_sync_proxy_rules_iptables_%s{ip_family=\"IPv4\",table=%q} %d\n", name, table, value)
		}
		nat, filter := rules("nat"), rules("filter")
		if nat < 10 || filter < 5 {
			t.Fatalf("the kernel has %d and %d rules", nat, filter)
		}
		s.page(t, "/metrics", metric("total", "nat", nat), metric("total", "filter", filter), metric("last", "nat", nat), metric("last", "filter", filter))
		p.web(t, podIPs[:2]...)
		s.page(t, "/metrics", metric("total", "nat", rules("nat")), metric("total", "filter", filter), metric("last", "filter", 0))
		s.page(t, "/healthz", "ok")
		s.page(t, "/metrics/slis", "\nkubernetes_healthcheck{name=\"ping\",type=\"healthz\"} 1\n", `kubernetes_healthchecks_total{name="ping",status="success",type="healthz"} `)
		s.page(t, "/flagz", "nodeproxy flagz\n", "\nproxy-mode=iptables\n", "\nmasquerade-all=false\n", "\nmanifests="+p.dir+"\n")
		s.page(t, "/statusz", "nodeproxy statusz\n", "\nMode: iptables\n", "\nFamilies: [IPv4 IPv6]\n", "/metrics/slis")
		s.page(t, "/proxyMode", "iptables")
		// Every scrape reads the counters of the rules.
		text := must.Get(s.Node.Run(t, "iptables-save", "-t", "filter"))(t)
		netlab.Need(t, strings.Contains(text, "--nfacct-name"), "nfacct in kernel and iptables")
		for n := range 3 {
			s.page(t, "/metrics", "\nkubeproxy_iptables_ct_state_invalid_dropped_packets_total ", fmt.Sprintf("\nkubeproxy_iptables_localhost_nodeports_accepted_packets_total %d\n", n))
			_, _, _ = lab.Visit(s.Node, "", "127.0.0.1:30080") // counts, even if a busy machine answers it too late
		}
	},
	// --v of a running agent, one of whose pages is turned off.
	"/debug/flags/v": func(t *testing.T, s *site) {
		checked := webService[:strings.Index(webService, "type:")] + "type: LoadBalancer\n  externalTrafficPolicy: Local\n  healthCheckNodePort: 30081\n" + webService[strings.Index(webService, "  clusterIP"):]
		dir := t.TempDir()
		objects := func(service string) { put(t, dir, "web.yaml", service+"---\n"+webSlice(podIPs[0])) }
		objects(checked)
		p := start(t, s.Node, "run", "--manifests", dir, "--hostname-override", "n1", "--min-sync-period=0", "--profiling", "--metrics-bind-address", metricsAt, "--feature-gates=ComponentFlagz=false")
		tr := &http.Transport{DialContext: func(ctx context.Context, network, to string) (net.Conn, error) {
			return s.Client.Dial(ctx, network, "", to)
		}}
		defer tr.CloseIdleConnections()
		ask := func(method, body string) int {
			t.Helper()
			answer, err := tr.RoundTrip(must.Get(http.NewRequestWithContext(t.Context(), method, "http://"+metricsAt+"/debug/flags/v", strings.NewReader(body)))(t))
			if err != nil {
				return 0 // the server is not up yet
			}
			answer.Body.Close()
			return answer.StatusCode
		}
		toggle := func() {
			for _, service := range []string{webService, checked} {
				objects(service)
				p.synced(t, "services=1 endpoints=1 changed=1")
			}
		}
		p.synced(t, "services=1 endpoints=1 changed=1")
		eventually(t, "GET is rejected", func() bool { return ask(http.MethodGet, "") == http.StatusNotAcceptable })
		if code := ask(http.MethodPut, "many"); code != http.StatusBadRequest {
			t.Errorf("a bad verbosity: status %d", code)
		}
		if code, _, _ := get(t, s.Client, "http://"+metricsAt+"/flagz"); code != http.StatusNotFound {
			t.Errorf("/flagz is served without its feature gate: status %d", code)
		}
		if code, text, _ := get(t, s.Client, "http://"+metricsAt+"/statusz"); code != 200 || strings.Contains(text, "/flagz") || !strings.Contains(text, "/debug/flags/v") {
			t.Errorf("/statusz: status %d\n%s", code, text)
		}
		const debug = `"closed a health-check node port"`
		if toggle(); strings.Contains(p.log(), debug) {
			t.Errorf("logged at --v=0:\n%s", p.log())
		}
		if code := ask(http.MethodPut, "4"); code != http.StatusOK {
			t.Errorf("a good verbosity: status %d", code)
		}
		// A port that was in use for a moment is not open yet.
		eventually(t, "a debug line", func() bool { toggle(); return strings.Contains(p.log(), debug) })
	},
	// Infos go to standard output, whose buffer is flushed at the end, and errors to standard error.
	"logging.options.json": func(t *testing.T, s *site) {
		p := start(t, s.Node, "run", "--cleanup",
			"--feature-gates=LoggingAlphaOptions=true", "--logging-format=json", "--log-json-split-stream", "--log-json-info-buffer-size=64Ki", "--log-flush-frequency=1h")
		code, out := p.exit(t)
		if code != 0 || p.log() != "" || len(out) == 0 {
			t.Errorf("exit status %d, standard output %q, standard error:\n%s", code, out, p.log())
		}
		for _, line := range out {
			var info struct{ Msg, Caller string }
			if err := json.Unmarshal([]byte(line), &info); err != nil || info.Msg == "" || !strings.HasPrefix(info.Caller, "run/") {
				t.Errorf("error %v: %s", err, line)
			}
		}
	},
	"resetConnectionsOfVanishedEndpoints in mode userspace": func(t *testing.T, s *site) {
		s.serveWeb(t, podIPs, "--proxy-mode", "userspace", "--reset-connections-of-vanished-endpoints=10s").logged(t, "--reset-connections-of-vanished-endpoints has no effect in mode userspace")
	},
}

// metricsAt is an address of the node for the metrics.
const metricsAt = "192.0.2.1:10249"

// page waits until a page at metricsAt has texts.
func (s *site) page(t *testing.T, path string, want ...string) {
	t.Helper()
	eventually(t, path+" has "+strings.Join(want, ", "), func() bool {
		code, text, _ := get(t, s.Client, "http://"+metricsAt+path)
		return code == 200 && !slices.ContainsFunc(want, func(w string) bool { return !strings.Contains(text, w) })
	})
}

// inModes runs a check in each mode that any kernel has.
func inModes(check func(t *testing.T, s *site, mode string)) func(*testing.T, *site) {
	return func(t *testing.T, _ *site) {
		for _, mode := range explainedModes {
			t.Run(mode, func(t *testing.T) {
				t.Parallel()
				needMode(t, mode)
				check(t, newSite(t), mode)
			})
		}
	}
}

// talkTo opens connections from a host to the Service until one goes to the pod.
func talkTo(t *testing.T, h *netlab.Host, pod string) *lab.Talk {
	t.Helper()
	for range 200 {
		c := must.Get(lab.Dial(h, "tcp", "", clusterVIP, testtime.Timeout))(t)
		name, _, err := c.Hear()
		must.Do(t, err)
		if name == pod {
			t.Cleanup(func() { c.Close() })
			return c
		}
		c.Close()
	}
	t.Fatalf("no connection reached %s", pod)
	return nil
}

// TestFlagsDoWhatTheySay runs flagChecks, each on a node of its own.
func TestFlagsDoWhatTheySay(t *testing.T) {
	t.Parallel()
	for name, check := range flagChecks {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			check(t, newSite(t))
		})
	}
}
