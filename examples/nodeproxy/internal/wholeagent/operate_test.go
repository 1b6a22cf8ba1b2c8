//go:build linux

package wholeagent

import (
	"encoding/json"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/go-proxier/proxier/examples/internal/node/configtest"
	"github.com/go-proxier/proxier/examples/internal/node/modes"
	"github.com/go-proxier/proxier/examples/internal/node/objects"
	"github.com/go-proxier/proxier/examples/nodeproxy/internal/cli"
	"github.com/go-proxier/proxier/examples/nodeproxy/internal/lab"
	"github.com/go-proxier/proxier/examples/nodeproxy/internal/program"
	"github.com/go-proxier/proxier/internal/testing/must"
	"github.com/go-proxier/proxier/internal/testing/netlab"
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
	p := start(t, s.Node, "run", "--manifests", dir, "--config", file, "--masquerade-all")
	eventually(t, "the Service is in effect", func() bool { return strings.Count(p.log(), `"msg":"synced"`) == 1 })
	s.answeredBy(t, clusterVIP, podIPs[0])
	if _, source, err := lab.Visit(s.Client, "", clusterVIP); err != nil || source != "10.1.0.1" {
		t.Errorf("the pod sees %q, error %v", source, err)
	}
	p.logged(t, `--masquerade-all is ignored`)
	p.logged(t, `unknown field \"udpIdleTimeout\"`)
	if value, err := s.Node.Output("cat", "/proc/sys/net/netfilter/nf_conntrack_tcp_timeout_established"); err != nil || value != "10800\n" {
		t.Errorf("the timeout is %q, error %v", value, err)
	}
	if code, _, _ := get(t, s.Client, "http://192.0.2.1:10249/debug/pprof/cmdline"); code != 404 {
		t.Errorf("pprof is served without enableProfiling: %d", code)
	}
	if code, _, _ := get(t, s.Client, "http://192.0.2.1:10249/debug/flags/v"); code != 404 {
		t.Errorf("/debug/flags/v is served without enableProfiling: %d", code)
	}

	// The same content in a new file does not count as a change.
	text := must.Get(os.ReadFile(file))(t)
	put(t, etc, "config.yaml", string(text))
	put(t, dir, "web.yaml", webService+"---\n"+webSlice(podIPs[1]))
	eventually(t, "the new endpoint is in effect", func() bool { return strings.Count(p.log(), `"msg":"synced"`) == 2 })
	// Neither does a comment. An invalid file leaves the agent as it is.
	put(t, etc, "config.yaml", string(text)+"\n# Something else.\n")
	p.logged(t, "the configuration file changed without effect")
	invalid := func() string { _, body, _ := get(t, s.Client, "http://192.0.2.1:10249/metrics"); return body }
	for n, wrong := range []string{"mode: ipvsx\n", "{"} {
		put(t, etc, "config.yaml", string(text)+wrong)
		eventually(t, "the file is reported", func() bool { return strings.Count(p.log(), "the changed configuration file is invalid") == n+1 })
		if !strings.Contains(invalid(), "proxier_configuration_file_invalid 1\n") {
			t.Error("the metric does not say that the file is invalid")
		}
	}
	put(t, etc, "config.yaml", string(text))
	eventually(t, "the file is valid again", func() bool { return strings.Contains(invalid(), "proxier_configuration_file_invalid 0\n") })
	s.answeredBy(t, clusterVIP, podIPs[1])
	put(t, etc, "config.yaml", strings.Replace(string(text), "250ms", "240ms", 1)+"\nbindAddressHardFail: true\n")
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
	p := &cli.Program{Out: &both, Diag: &both}
	if code := program.Dispatch(t.Context(), p, []string{"run", "--proxy-mode", "iptables", "--cluster-cidr", "10.0.0.0/8", "--write-config-to", file}); code != 0 {
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
	netlab.NeedPrograms(t, "nft")
	s := newSite(t)
	s.serveWeb(t, podIPs[:1], "--metrics-bind-address", "192.0.2.1:10249")
	listing := func() string {
		t.Helper()
		text := must.Get(s.Node.Run(t, "nft", "--stateless", "--handle", "list", "ruleset"))(t)
		return text
	}
	was := listing()
	dir := t.TempDir()
	put(t, dir, "web.yaml", webService+"---\n"+webSlice(podIPs[1]))
	for _, flags := range [][]string{
		{"--metrics-bind-address", "192.0.2.1:10248"},
		{"--metrics-bind-address", "192.0.2.1:10249", "--healthz-bind-address", "192.0.2.1:10255"},
	} {
		code, out, log := verb(t, s.Node, append([]string{"run", "--manifests", dir, "--hostname-override", "n1", "--bind-address-hard-fail"}, flags...)...)
		if code != 1 || len(out) != 0 || !strings.Contains(log, "address already in use") {
			t.Errorf("%q: exit status %d, output %q, log:\n%s", flags, code, out, log)
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
	s, dir := webSite(t, podIPs[0])
	l := must.Get(s.Node.Listen("tcp", "192.0.2.1:10249"))(t)
	args := []string{"run", "--manifests", dir, "--metrics-bind-address", "192.0.2.1:10249"}
	if code, _, log := verb(t, s.Node, append(args, "--bind-address-hard-fail")...); code != 1 || !strings.Contains(log, "metrics at 192.0.2.1:10249") {
		t.Errorf("exit status %d, log:\n%s", code, log)
	}
	p := embed(t, s.Node, append(args, "--readyz-bind-address", "127.0.0.1:10266")...)
	p.synced(t, "services=1 endpoints=1 changed=1")
	p.logged(t, "a server failed and will be restarted")
	eventually(t, "/readyz does not need the ports", status(t, s.Node, "http://127.0.0.1:10266/readyz", 200))
	l.Close()
	eventually(t, "metrics are served when the port is free", status(t, s.Client, "http://192.0.2.1:10249/metrics", 200))
	p.logged(t, "the server listens")
}

// TestLiveSwitchBreaksNoConnection changes from one data plane to another within one
// process: it attaches and syncs the new one before it removes the rules of the old one.
func TestLiveSwitchBreaksNoConnection(t *testing.T) {
	t.Parallel()
	needMode(t, "iptables")
	s, dir := webSite(t, podIPs...)
	c := configtest.Parsed(t, []string{"run", "--manifests", dir, "--hostname-override", "n1"})
	var stream *lab.Stream
	err := s.Node.Do(func() error {
		w, err := objects.Peek(t.Context(), c, cli.OwnLogger(c, new(strings.Builder)))
		if err != nil {
			return err
		}
		var old *ruleset.Cursor
		var oldMode modes.Mode
		for i := range 4 {
			m := modes.All(nil)[i%2]
			plane, err := m.Open(t.Context(), modes.Settings{
				Config: c, Families: []tracker.Family{tracker.IPv4, tracker.IPv6}, Rules: func(tracker.Family, string, int, int) {}, Log: w.Log,
			})
			if err != nil {
				return err
			}
			defer plane.Close()
			cur := w.Engine.Attach(m.Name, plane)
			if err := cur.Sync(t.Context()); err != nil {
				return err
			}
			if old == nil {
				stream = s.stream()
			} else {
				old.Detach()
				if err := oldMode.Cleanup(t.Context(), w.Log); err != nil {
					return err
				}
			}
			stream.Next(40)
			old, oldMode = cur, m
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	if y := stream.Stop(); len(y.Errs) != 0 {
		t.Errorf("%d connections failed, first: %v", len(y.Errs), y.Errs[0])
	}
}

// TestReadOnlyParametersAreLogged runs where the limit of connections cannot be set, as in a
// container. The agent serves, and logs the flag that leaves the parameter alone.
func TestReadOnlyParametersAreLogged(t *testing.T) {
	t.Parallel()
	s := newSite(t)
	const more = "--conntrack-min=2000000000" // the limit is only raised
	p, _ := s.serveWeb(t, podIPs[:1], more)
	_, err := s.Node.Output("test", "-e", "/proc/sys/net/netfilter/nf_conntrack_max")
	netlab.Need(t, err == nil, "nf_conntrack sysctls in network namespaces")
	for _, want := range []string{"] \"cannot set a kernel parameter\"", "/proc/sys/net/netfilter/nf_conntrack_max is ", "cannot be set to ", "set it on the host, or ask for no change", `skipWith="--conntrack-max-per-core=0"`} {
		p.logged(t, want)
	}
	s.answeredBy(t, clusterVIP, podIPs[0])
	for args, code := range map[string]int{"--init-only": 1, "--init-only --conntrack-max-per-core=0": 0} {
		if got, _, log := verb(t, s.Node, append([]string{"run", more}, strings.Fields(args)...)...); got != code || (code == 0) == strings.Contains(log, "nf_conntrack_max") {
			t.Errorf("%s: exit status %d, want %d, log:\n%s", args, got, code, log)
		}
	}
}

// TestAgentWaitsForTheAPIServer starts the agent without an API server. It must not change
// existing rules.
func TestAgentWaitsForTheAPIServer(t *testing.T) {
	t.Parallel()
	s := newSite(t)
	p, _ := s.serveWeb(t, podIPs[:1])
	p.stop(t)
	for _, mode := range []string{"ClusterCIDR", "NodeCIDR"} {
		p = start(t, s.Node, "run", "--master", "http://"+net.JoinHostPort(lab.NodeAddr[0], "1"), "--hostname-override", "n1", "--detect-local-mode", mode)
		p.logged(t, "connection refused")
		s.answeredBy(t, clusterVIP, podIPs[0])
		p.Process.Signal(os.Interrupt)
		if code, rest := p.exit(t); code != 0 || len(rest) != 0 {
			t.Errorf("%s: exit status %d, lines %q, log:\n%s", mode, code, rest, p.log())
		}
	}
}
