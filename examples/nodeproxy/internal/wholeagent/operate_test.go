//go:build linux

package wholeagent

import (
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/go-proxier/proxier/examples/internal/node/configtest"
	"github.com/go-proxier/proxier/examples/internal/node/modes"
	"github.com/go-proxier/proxier/examples/internal/node/objects"
	"github.com/go-proxier/proxier/examples/nodeproxy/internal/cli"
	"github.com/go-proxier/proxier/examples/nodeproxy/internal/lab"
	"github.com/go-proxier/proxier/internal/testing/must"
	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/tracker"
)

const kubeProxyConfig = "apiVersion: kubeproxy.config.k8s.io/v1alpha1\nkind: KubeProxyConfiguration\n"

// TestConfigFileIsInEffectUntilItChanges runs with a configuration file, and changes it.
func TestConfigFileIsInEffectUntilItChanges(t *testing.T) {
	t.Parallel()
	s := newSite(t)
	dir, etc := t.TempDir(), t.TempDir()
	rollOut(t, dir, podIPs[0])
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
	rollOut(t, dir, podIPs[1])
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
	if code, out := p.exit(t); code != 1 || len(out) != 0 || !strings.Contains(p.log(), "configuration file changed: restart needed") {
		t.Errorf("exit status %d, log:\n%s", code, p.log())
	}
	for line := range strings.Lines(p.log()) {
		var entry struct {
			Msg, Took, Waited            string
			Services, Endpoints, Changed int
		}
		if err := json.Unmarshal([]byte(line), &entry); err != nil {
			t.Errorf("not JSON: %v: %s", err, line)
		}
		if entry.Msg == "synced" && (entry.Services != 1 || entry.Endpoints != 1 || entry.Changed != 1 || entry.Took == "" || entry.Waited == "") {
			t.Errorf("%+v", entry)
		}
	}
	s.answeredBy(t, clusterVIP, podIPs[1])
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
