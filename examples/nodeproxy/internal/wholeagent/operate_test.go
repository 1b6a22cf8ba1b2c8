//go:build linux

package wholeagent

import (
	"path/filepath"
	"strings"
	"testing"

	"github.com/go-proxier/proxier/examples/internal/node/configtest"
	"github.com/go-proxier/proxier/examples/internal/node/modes"
	"github.com/go-proxier/proxier/examples/internal/node/objects"
	"github.com/go-proxier/proxier/examples/nodeproxy/internal/cli"
	"github.com/go-proxier/proxier/examples/nodeproxy/internal/lab"
	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/tracker"
)

const kubeProxyConfig = "apiVersion: kubeproxy.config.k8s.io/v1alpha1\nkind: KubeProxyConfiguration\n"

// TestConfigFileIsInEffectUntilItChanges runs with a configuration file, and changes it.
func TestConfigFileIsInEffectUntilItChanges(t *testing.T) {
	t.Parallel()
	s := newSite(t)
	etc := t.TempDir()
	const text = kubeProxyConfig + `mode: nftables
clusterCIDR: 10.1.0.0/16
metricsBindAddress: ` + metricsAt + `
enableProfiling: false
udpIdleTimeout: 250ms
conntrack: {maxPerCore: 0, tcpEstablishedTimeout: 3h}
nftables: {minSyncPeriod: 10ms}
`
	put(t, etc, "config.yaml", text)
	file := filepath.Join(etc, "config.yaml")
	p := s.serveWeb(t, podIPs[:1], "--config", file, "--masquerade-all")
	s.answeredBy(t, clusterVIP, podIPs[0])
	if _, source, err := lab.Visit(s.Client, "", clusterVIP); err != nil || source != "10.1.0.1" {
		t.Errorf("the pod sees %q, error %v", source, err)
	}
	p.logged(t, `--masquerade-all is ignored`)
	p.logged(t, `unknown field \"udpIdleTimeout\"`)
	if value := sysctl(t, s.Node, "net/netfilter/nf_conntrack_tcp_timeout_established"); value != "10800" {
		t.Errorf("the timeout is %q", value)
	}
	for _, page := range []string{"/debug/pprof/cmdline", "/debug/flags/v"} {
		if code, _, _ := get(t, s.Client, "http://"+metricsAt+page); code != 404 {
			t.Errorf("%s is served without enableProfiling: %d", page, code)
		}
	}

	// The same content in a new file does not count as a change, and neither does a comment. An invalid file leaves the
	// agent as it is.
	put(t, etc, "config.yaml", text)
	p.web(t, podIPs[1])
	put(t, etc, "config.yaml", text+"\n# Something else.\n")
	p.logged(t, "the configuration file changed without effect")
	for n, wrong := range []string{"mode: ipvsx\n", "{"} {
		put(t, etc, "config.yaml", text+wrong)
		eventually(t, "the file is reported", func() bool { return strings.Count(p.log(), "the changed configuration file is invalid") == n+1 })
		s.page(t, "/metrics", "proxier_configuration_file_invalid 1\n")
	}
	put(t, etc, "config.yaml", text)
	s.page(t, "/metrics", "proxier_configuration_file_invalid 0\n")
	s.answeredBy(t, clusterVIP, podIPs[1])
	put(t, etc, "config.yaml", strings.Replace(text, "250ms", "240ms", 1)+"\nbindAddressHardFail: true\n")
	if code, out := p.exit(t); code != 1 || len(out) != 0 || !strings.Contains(p.log(), "configuration file changed: restart needed") {
		t.Errorf("exit status %d, log:\n%s", code, p.log())
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
