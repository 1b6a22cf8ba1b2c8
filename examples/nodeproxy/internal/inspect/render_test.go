package inspect

import (
	"bytes"
	"context"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/go-proxier/proxier/examples/internal/node/modes"
	"github.com/go-proxier/proxier/examples/nodeproxy/internal/cli"
	"github.com/go-proxier/proxier/internal/testing/must"
)

const demoWorld = "../demo/world"

// rendered returns what the verb prints.
func rendered(t *testing.T, args ...string) (string, error) {
	t.Helper()
	var out, diag bytes.Buffer
	c := RenderCommand(&cli.Program{Out: &out, Diag: &diag})
	c.SilenceErrors, c.SilenceUsage = true, true
	c.SetArgs(append([]string{"--manifests", demoWorld, "--hostname-override", "node-1"}, args...))
	err := c.ExecuteContext(context.Background())
	if err != nil {
		t.Logf("log: %s", &diag)
	}
	return out.String(), err
}

// edited returns a copy of the demo's manifests in which a text of a file is replaced.
func edited(t *testing.T, file, old, text string) string {
	t.Helper()
	dir := t.TempDir()
	must.Do(t, os.CopyFS(dir, os.DirFS(demoWorld)))
	path := filepath.Join(dir, file)
	b, err := os.ReadFile(path)
	if err != nil || !bytes.Contains(b, []byte(old)) {
		t.Fatalf("%v, or %s has no %q", err, file, old)
	}
	must.Do(t, os.WriteFile(path, bytes.Replace(b, []byte(old), []byte(text), 1), 0o600))
	return dir
}

func TestRenderPrintsRules(t *testing.T) {
	t.Parallel()
	for mode, want := range map[string][]string{
		"nftables": {"table ip proxier {", "table ip6 proxier {", "10.96.0.10 . tcp . 80 comment \"shop/web:http\" : "},
		"iptables": {"# iptables-restore --noflush\n", "# ip6tables-restore --noflush\n", "--to-destination 10.1.1.2:8080\n"},
		"ipvs":     {"ipvsadm -R <<'END'\n", "-a -t 10.96.0.10:80 -r 10.1.1.2:8080 -m -w 1\n", "add KUBE-CLUSTER-IP 10.96.0.10,tcp:80 -exist\n", "addr add 10.96.0.10/32 dev kube-ipvs0\n"},
	} {
		got := must.Get(rendered(t, "--proxy-mode", mode))(t)
		for _, w := range want {
			if !strings.Contains(got, w) {
				t.Errorf("%s: no %q in\n%s", mode, w, got)
			}
		}
	}
	if _, err := rendered(t, "--proxy-mode", "userspace"); !errors.Is(err, modes.ErrNoRenderer) {
		t.Errorf("mode userspace: %v", err)
	}
}

func TestRenderPrintsWhatAChangeDoes(t *testing.T) {
	t.Parallel()
	without := edited(t, "endpoints-web.yaml", "- {addresses: [10.1.1.3], nodeName: node-1} # pod-2\n", "")
	for mode, want := range map[string]string{
		"nftables": "# IPv4: ~shop/web:http/TCP/IPv4\n",
		"iptables": "# IPv4: ~shop/web:http/TCP/IPv4\n# iptables-restore --noflush\n*nat\n",
		"ipvs":     "# IPv4 and IPv6: ~shop/web:http/TCP/IPv4\nipvsadm -R <<'END'\n-e -t 10.96.0.10:80 -r 10.1.1.3:8080 -m -w 0\n",
	} {
		got, err := rendered(t, "--proxy-mode", mode, "--diff", without)
		if err != cli.StatusError(1) || !strings.HasPrefix(got, want) {
			t.Errorf("%s: %v\n%s\nwant first\n%s", mode, err, got, want)
		}
		if all, _ := rendered(t, "--proxy-mode", mode); len(got) > len(all)/4 || strings.Contains(got, "/IPv6") {
			t.Errorf("%s: one endpoint less prints more than it changes:\n%s", mode, got)
		}
		if got, err := rendered(t, "--proxy-mode", mode, "--diff", demoWorld); got != "" || err != nil {
			t.Errorf("%s: no change prints %q, %v", mode, got, err)
		}
	}
	// A Service that only the other folder has, and one that it lacks.
	renamed := edited(t, "services.yaml", "{name: web, namespace: shop}", "{name: shop-front, namespace: shop}")
	got, err := rendered(t, "--diff", renamed, "--proxy-mode", "nftables")
	if err != cli.StatusError(1) || !strings.Contains(got, "+shop/shop-front:http/TCP/IPv4") || !strings.Contains(got, "-shop/web:http/TCP/IPv4") {
		t.Errorf("%v\n%s", err, got)
	}
}
