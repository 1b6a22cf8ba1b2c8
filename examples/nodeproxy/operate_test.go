package main

import (
	"context"
	"encoding/json"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/go-proxier/proxier/conntrack"
	"github.com/go-proxier/proxier/examples/nodeproxy/internal/config"
	"github.com/go-proxier/proxier/internal/netlab"
	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/tracker"
)

const kubeProxyConfig = "apiVersion: kubeproxy.config.k8s.io/v1alpha1\nkind: KubeProxyConfiguration\n"

// TestConfigFileIsInEffectUntilItChanges runs with a configuration file, and changes it.
func TestConfigFileIsInEffectUntilItChanges(t *testing.T) {
	t.Parallel()
	s := newSite(t)
	dir, etc := t.TempDir(), t.TempDir()
	put(t, dir, "web.yaml", webService+"---\n"+webSlice(podIPs[0]))
	put(t, etc, "config.yaml", kubeProxyConfig+`mode: nftables
hostnameOverride: n1
clusterCIDR: 10.1.0.0/16
metricsBindAddress: 192.0.2.1:10249
enableProfiling: false
udpIdleTimeout: 250ms
conntrack: {maxPerCore: 0, tcpEstablishedTimeout: 3h}
nftables: {minSyncPeriod: 10ms}
logging: {format: json}
`)
	file := filepath.Join(etc, "config.yaml")
	p := start(t, s.node, "run", "--manifests", dir, "--config", file, "--masquerade-all")
	eventually(t, "the Service is in effect", func() bool { return strings.Count(p.log(), `"msg":"synced"`) == 1 })
	s.answeredBy(t, clusterVIP, podIPs[0])
	if _, source, err := visit(s.client, "", clusterVIP); err != nil || source != "10.1.0.1" {
		t.Errorf("the pod sees %q, error %v", source, err)
	}
	p.logged(t, `--masquerade-all is ignored`)
	p.logged(t, `unknown field \"udpIdleTimeout\"`)
	if value, err := s.node.Output("cat", "/proc/sys/net/netfilter/nf_conntrack_tcp_timeout_established"); err != nil || value != "10800\n" {
		t.Errorf("the timeout is %q, error %v", value, err)
	}
	if code, _, _ := get(t, s.client, "http://192.0.2.1:10249/debug/pprof/cmdline"); code != 404 {
		t.Errorf("pprof is served without enableProfiling: %d", code)
	}
	if code, _, _ := get(t, s.client, "http://192.0.2.1:10249/debug/flags/v"); code != 404 {
		t.Errorf("/debug/flags/v is served without enableProfiling: %d", code)
	}

	// The same content in a new file does not count as a change.
	text, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	put(t, etc, "config.yaml", string(text))
	put(t, dir, "web.yaml", webService+"---\n"+webSlice(podIPs[1]))
	eventually(t, "the new endpoint is in effect", func() bool { return strings.Count(p.log(), `"msg":"synced"`) == 2 })
	put(t, etc, "config.yaml", string(text)+"\n# Something else.\n")
	if code, _ := p.exit(t); code != 1 || !strings.Contains(p.log(), "configuration file changed: restart needed") {
		t.Errorf("exit status %d, log:\n%s", code, p.log())
	}
	for line := range strings.Lines(p.log()) {
		if !json.Valid([]byte(line)) {
			t.Errorf("not JSON: %s", line)
		}
	}
	s.answeredBy(t, clusterVIP, podIPs[1])
}

func TestEffectiveConfigIsWritten(t *testing.T) {
	t.Parallel()
	file := filepath.Join(t.TempDir(), "written.yaml")
	var both strings.Builder
	p := &program{modes: allModes(), out: &both, diag: &both}
	if code := p.dispatch(t.Context(), []string{"run", "--proxy-mode", "iptables", "--cluster-cidr", "10.0.0.0/8", "--write-config-to", file}); code != 0 {
		t.Fatalf("exit status %d: %s", code, both.String())
	}
	text, err := os.ReadFile(file)
	if err != nil || !strings.Contains(string(text), "\nmode: iptables\n") || !strings.Contains(string(text), "\nclusterCIDR: 10.0.0.0/8\n") {
		t.Errorf("error %v:\n%s", err, text)
	}
}

// TestHardFailChangesNoRule starts a second agent, with other endpoints, while the first has
// the ports.
func TestHardFailChangesNoRule(t *testing.T) {
	t.Parallel()
	_, err := exec.LookPath("nft")
	netlab.Need(t, err == nil, "nft")
	s := newSite(t)
	s.serveWeb(t, podIPs[:1], "--metrics-bind-address", "192.0.2.1:10249")
	listing := func() string {
		t.Helper()
		text, err := s.node.Output("nft", "--stateless", "--handle", "list", "ruleset")
		if err != nil {
			t.Fatal(err)
		}
		return text
	}
	was := listing()
	dir := t.TempDir()
	put(t, dir, "web.yaml", webService+"---\n"+webSlice(podIPs[1]))
	for _, flags := range [][]string{
		{"--metrics-bind-address", "192.0.2.1:10248"},
		{"--metrics-bind-address", "192.0.2.1:10249", "--healthz-bind-address", "192.0.2.1:10255"},
	} {
		p := start(t, s.node, append([]string{"run", "--manifests", dir, "--hostname-override", "n1", "--bind-address-hard-fail"}, flags...)...)
		if code, out := p.exit(t); code != 1 || len(out) != 0 || !strings.Contains(p.log(), "address already in use") {
			t.Errorf("%q: exit status %d, output %q, log:\n%s", flags, code, out, p.log())
		}
	}
	if now := listing(); now != was {
		t.Errorf("the rules changed from\n%s\nto\n%s", was, now)
	}
	s.answeredBy(t, clusterVIP, podIPs[0])
}

// TestServersFailOrRetryIfPortsAreTaken starts the agent while its ports are in use.
func TestServersFailOrRetryIfPortsAreTaken(t *testing.T) {
	t.Parallel()
	s := newSite(t)
	dir := t.TempDir()
	put(t, dir, "web.yaml", webService+"---\n"+webSlice(podIPs[0]))
	l, err := s.node.Listen("tcp", "192.0.2.1:10249")
	if err != nil {
		t.Fatal(err)
	}
	args := []string{"run", "--manifests", dir, "--metrics-bind-address", "192.0.2.1:10249"}
	p := start(t, s.node, append(args, "--bind-address-hard-fail")...)
	if code, _ := p.exit(t); code != 1 || !strings.Contains(p.log(), "metrics at 192.0.2.1:10249") {
		t.Errorf("exit status %d, log:\n%s", code, p.log())
	}
	p = start(t, s.node, args...)
	p.synced(t, "services=1 endpoints=1 changed=1")
	p.logged(t, "a server failed and will be restarted")
	l.Close()
	eventually(t, "metrics are served when the port is free", func() bool {
		code, _, _ := get(t, s.client, "http://192.0.2.1:10249/metrics")
		return code == 200
	})
}

// TestFamiliesThatWorkAreServed checks nodes that lack an address family.
func TestFamiliesThatWorkAreServed(t *testing.T) {
	four, six := tracker.IPv4, tracker.IPv6
	for _, tt := range []struct {
		name string
		lack tracker.Family
		ipv6 bool
		bind string
		want string
	}{
		{"both", 0, true, "", "[IPv4 IPv6]"},
		{"no IPv6", 0, false, "", "[IPv4]"},
		{"no IPv6, and an IPv4 address", 0, false, "192.0.2.1", "[IPv4]"},
		{"no IPv6, but an IPv6 address", 0, false, "2001:db8::1", "error"},
		{"no programs for IPv6", six, true, "", "[IPv4]"},
		{"no programs for IPv4", four, true, "", "[IPv6]"},
		{"no programs for IPv4, and an IPv6 address", four, true, "2001:db8::1", "[IPv6]"},
		{"no programs for IPv4, but an IPv4 address", four, true, "192.0.2.1", "error"},
		{"nothing", four, false, "", "error"},
	} {
		m := mode{probe: func(_ context.Context, s settings) error {
			if slices.Contains(s.families, tt.lack) {
				return fmt.Errorf("%v is missing", tt.lack)
			}
			return nil
		}}
		c := parsed(t, []string{"run", "--bind-address", map[bool]string{true: "0.0.0.0", false: tt.bind}[tt.bind == ""]})
		var diag strings.Builder
		got, err := servedFamilies(t.Context(), m, c, tt.ipv6, ownLogger(c, &diag))
		if s := fmt.Sprint(got); (err != nil) != (tt.want == "error") || err == nil && s != tt.want {
			t.Errorf("%s: %v, error %v, want %s", tt.name, s, err, tt.want)
		}
		if warns := strings.Contains(diag.String(), "cannot serve an address family"); err == nil && warns != (len(got) == 1) {
			t.Errorf("%s: log %q", tt.name, diag.String())
		}
	}
}

// TestNodeAddressTakesPrecedenceByFamily checks which source the node's addresses come from.
func TestNodeAddressTakesPrecedenceByFamily(t *testing.T) {
	dir := t.TempDir()
	put(t, dir, "node.yaml", "apiVersion: v1\nkind: Node\nmetadata: {name: n1, labels: {topology.kubernetes.io/zone: z}}\nstatus: {addresses: [{type: InternalIP, address: 192.0.2.1}, {type: InternalIP, address: '2001:db8::1'}, {type: ExternalIP, address: 198.51.100.1}]}\n")
	for _, tt := range []struct{ name, bind, want string }{
		{"n1", "0.0.0.0", "[192.0.2.1 2001:db8::1]"},
		{"n1", "::", "[192.0.2.1 2001:db8::1]"},
		{"n1", "203.0.113.1", "[203.0.113.1 2001:db8::1]"},
		{"n1", "2001:db8::9", "[2001:db8::9 192.0.2.1]"},
		{"n2", "203.0.113.1", "[203.0.113.1]"},
	} {
		c := parsed(t, []string{"run", "--manifests", dir, "--hostname-override", tt.name, "--bind-address", tt.bind})
		w, err := peek(t.Context(), c, ownLogger(c, new(strings.Builder)))
		if err != nil {
			t.Fatal(err)
		}
		if got := fmt.Sprint(w.tracker.Node().Addresses); got != tt.want {
			t.Errorf("%s at %s: %s, want %s", tt.name, tt.bind, got, tt.want)
		}
		if zone := w.tracker.Node().Zone; (zone == "z") != (tt.name == "n1") {
			t.Errorf("%s: zone %q", tt.name, zone)
		}
	}
}

// TestLocalhostNodePortsFollowKubeProxysRule checks when NodePorts answer at loopback
// addresses.
func TestLocalhostNodePortsFollowKubeProxysRule(t *testing.T) {
	for _, tt := range []struct {
		at   string
		flag string
		want bool
	}{
		{"", "true", true},
		{"", "false", false},
		{"primary", "true", false},
		{"localhost", "true", true},
		{"primary,localhost", "true", true},
		{"10.0.0.0/8", "true", false},
		{"10.0.0.0/8,127.0.0.0/8", "true", true},
		{"127.0.0.1/32", "true", true},
		{"0.0.0.0/0", "true", true},
		{"fd00::/8", "true", true}, // IPv4 is not restricted
	} {
		c := parsed(t, []string{"run", "--proxy-mode", config.ModeIPTables, "--nodeport-addresses", tt.at, "--iptables-localhost-nodeports=" + tt.flag})
		if got := localhostNodePorts(c); got != tt.want {
			t.Errorf("%+v: %v", tt, got)
		}
	}
}

// TestLiveSwitchBreaksNoConnection changes from one data plane to another within one
// process: it attaches and syncs the new one before it removes the rules of the old one.
func TestLiveSwitchBreaksNoConnection(t *testing.T) {
	t.Parallel()
	needMode(t, "iptables")
	s := newSite(t)
	dir := t.TempDir()
	put(t, dir, "web.yaml", webService+"---\n"+webSlice(podIPs...))
	c := parsed(t, []string{"run", "--manifests", dir, "--hostname-override", "n1"})
	var stream *stream
	err := s.node.Do(func() error {
		w, err := peek(t.Context(), c, ownLogger(c, new(strings.Builder)))
		if err != nil {
			return err
		}
		var old *ruleset.Cursor
		var oldMode mode
		for i := range 4 {
			m := allModes()[i%2]
			plane, err := m.open(t.Context(), settings{
				Config: c, families: []tracker.Family{tracker.IPv4, tracker.IPv6}, rules: func(tracker.Family, string, int, int) {}, log: w.log,
			})
			if err != nil {
				return err
			}
			defer plane.Close()
			cur := w.engine.Attach(m.name, plane)
			if err := cur.Sync(t.Context()); err != nil {
				return err
			}
			if old == nil {
				stream = newStream(s.client, clusterVIP, s.client, nodePort)
			} else {
				old.Detach()
				if err := oldMode.cleanup(t.Context(), w.log); err != nil {
					return err
				}
			}
			stream.next(40)
			old, oldMode = cur, m
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	if y := stream.stop(); len(y.errs) != 0 {
		t.Errorf("%d connections failed, first: %v", len(y.errs), y.errs[0])
	}
}

// TestReadOnlyParametersAreLogged runs where the limit of connections cannot be set, as in a
// container. The agent serves, and logs the flag that leaves the parameter alone.
func TestReadOnlyParametersAreLogged(t *testing.T) {
	t.Parallel()
	s := newSite(t)
	const more = "--conntrack-min=2000000000" // the limit is only raised
	p, _ := s.serveWeb(t, podIPs[:1], more)
	_, err := s.node.Output("test", "-e", "/proc/sys/net/netfilter/nf_conntrack_max")
	netlab.Need(t, err == nil, "nf_conntrack sysctls in network namespaces")
	for _, want := range []string{"] \"cannot set a kernel parameter\"", "/proc/sys/net/netfilter/nf_conntrack_max is ", "cannot be set to ", "set it on the host, or ask for no change", `skipWith="--conntrack-max-per-core=0"`} {
		p.logged(t, want)
	}
	s.answeredBy(t, clusterVIP, podIPs[0])
	for args, code := range map[string]int{"--init-only": 1, "--init-only --conntrack-max-per-core=0": 0} {
		p := start(t, s.node, append([]string{"run", more}, strings.Fields(args)...)...)
		if got, _ := p.exit(t); got != code || (code == 0) == strings.Contains(p.log(), "nf_conntrack_max") {
			t.Errorf("%s: exit status %d, want %d, log:\n%s", args, got, code, p.log())
		}
	}
}

// TestEachParameterCanBeLeftAlone checks that every parameter has a flag that leaves it alone.
func TestEachParameterCanBeLeftAlone(t *testing.T) {
	all := conntrack.Tuning{MaxPerCore: 1, TCPEstablishedTimeout: 1, TCPCloseWaitTimeout: 1, UDPTimeout: 1, UDPStreamTimeout: 1, TCPBeLiberal: true}
	list, err := all.Settings(1)
	if err != nil {
		t.Fatal(err)
	}
	for _, s := range list {
		flag := skipFlag(s)
		if flag == "" {
			t.Fatalf("%s has no flag", s.Path)
		}
		c := parsed(t, []string{"run", "--conntrack-udp-timeout=1s", "--conntrack-udp-timeout-stream=1s", "--conntrack-tcp-be-liberal", flag})
		left, err := c.Tuning.Settings(1)
		if err != nil || slices.ContainsFunc(left, func(o conntrack.Setting) bool { return o.Path == s.Path }) || len(left) == 0 {
			t.Errorf("%s leaves %v, error %v", flag, left, err)
		}
	}
}

// TestAgentWaitsForTheAPIServer starts the agent without an API server. It must not change
// existing rules.
func TestAgentWaitsForTheAPIServer(t *testing.T) {
	t.Parallel()
	s := newSite(t)
	p, _ := s.serveWeb(t, podIPs[:1])
	p.Process.Kill()
	p.exit(t)
	for _, mode := range []string{"ClusterCIDR", "NodeCIDR"} {
		p = start(t, s.node, "run", "--master", "http://"+net.JoinHostPort(nodeAddr[0], "1"), "--hostname-override", "n1", "--detect-local-mode", mode)
		p.logged(t, "connection refused")
		s.answeredBy(t, clusterVIP, podIPs[0])
		p.Process.Signal(os.Interrupt)
		if code, rest := p.exit(t); code != 0 || len(rest) != 0 {
			t.Errorf("%s: exit status %d, lines %q, log:\n%s", mode, code, rest, p.log())
		}
	}
}
