//go:build linux

package wholeagent

import (
	"context"
	"fmt"
	"strings"
	"testing"

	"github.com/go-proxier/proxier/examples/nodeproxy/internal/cli"
	"github.com/go-proxier/proxier/examples/nodeproxy/internal/lab"
	"github.com/go-proxier/proxier/examples/nodeproxy/internal/program"
	"github.com/go-proxier/proxier/internal/testing/testtime"
	"github.com/go-proxier/proxier/ruleset/maglev"
)

// annotated returns a manifest with annotations "name: value" for its objects.
func annotated(manifest string, list ...string) string {
	return strings.Replace(manifest, "metadata:\n", "metadata:\n  annotations: {"+strings.Join(list, ", ")+"}\n", 1)
}

// TestExplainPredictsHashedEndpoints compares explain's output with the endpoints of real
// connections.
func TestExplainPredictsHashedEndpoints(t *testing.T) {
	t.Parallel()
	s := newSite(t)
	sources := []string{"192.0.2.9"}
	for i := range 4 {
		a := fmt.Sprintf("192.0.2.%d", 20+i)
		s.Client.Addrs("eth0", a+"/24")
		sources = append(sources, a)
	}
	dir := t.TempDir()
	explains := func(from string) (all, to string) {
		t.Helper()
		code, out, log := verb(t, s.Node, "explain", "--manifests", dir, "--hostname-override", "n1", "--allow-annotations", "balance,weights", "--from", from, clusterVIP)
		all = strings.Join(out, "\n")
		if code != 0 {
			t.Fatalf("explain --from %s: exit status %d:\n%s\n%s", from, code, all, log)
		}
		_, rest, _ := strings.Cut(all, "\nhash: "+from+" goes to ")
		to, _, _ = strings.Cut(rest, "\n")
		to, _, _ = strings.Cut(to, ":")
		return all, to
	}
	var p *process
	for _, how := range []string{"source", "source-port"} {
		put(t, dir, "web.yaml", annotated(webService, "go-proxier.github.io/balance: "+how)+"---\n"+annotated(webSlice(podIPs...), "go-proxier.github.io/weights: 10.1.0.2=2"))
		if p == nil {
			p = embed(t, s.Node, "run", "--manifests", dir, "--hostname-override", "n1", "--min-sync-period", "0s", "--allow-annotations", "balance,weights")
		}
		p.synced(t, "services=1 endpoints=3 changed=1")
		met := map[string]bool{}
		for i := range 5 {
			from, local := sources[i], sources[i]+":0"
			if how == "source-port" {
				from = fmt.Sprintf("192.0.2.9:%d", 40000+i)
				local = from
			}
			all, to := explains(from)
			if !strings.Contains(all, "hash: by source address") || !strings.Contains(all, fmt.Sprintf("in a Maglev table of %d slots\n", maglev.SizeFor(3))) || !strings.Contains(all, "weight 2 (50 %)") {
				t.Errorf("output:\n%s", all)
			}
			ctx, cancel := context.WithTimeout(t.Context(), testtime.Timeout)
			c, err := s.Client.Dial(ctx, "tcp", local, clusterVIP)
			cancel()
			if err != nil {
				t.Fatal(err)
			}
			name, _, err := lab.NewTalk(c).Hear()
			c.Close()
			if err != nil || name != to {
				t.Errorf("balance %s: %s got to %q, error %v; explain's output:\n%s", how, from, name, err, all)
			}
			met[name] = true
		}
		if len(met) < 2 {
			t.Errorf("balance %s: all sources got to %v", how, met)
		}
	}
	// Without a port explain cannot compute the hash.
	if all, to := explains("192.0.2.9"); to != "" || !strings.Contains(all, "add a port to see the endpoint of the source: --from 192.0.2.9:40000\n") {
		t.Errorf("output:\n%s", all)
	}
}

// TestExplainDescribesTheHashOfEachMode runs explain for a Service with a hash in each mode.
func TestExplainDescribesTheHashOfEachMode(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	put(t, dir, "web.yaml", annotated(webService, "go-proxier.github.io/balance: source")+"---\n"+annotated(webSlice(podIPs...), "go-proxier.github.io/weights: '10.1.0.2=2,10.1.0.4=0'"))
	for mode, want := range map[string]string{
		"nftables": "hash: 192.0.2.9 goes to 10.1.0.",
		"iptables": "hash: by source address, which mode iptables does not support: it chooses endpoints at random",
		"ipvs":     "hash: by source address, in the kernel's own Maglev table",
	} {
		var out, diag strings.Builder
		p := &cli.Program{Out: &out, Diag: &diag}
		code := program.Dispatch(t.Context(), p, []string{"explain", "--manifests", dir, "--hostname-override", "n1", "--kernel=false", "--allow-annotations", "balance,weights", "--proxy-mode", mode, "--from", "192.0.2.9", clusterVIP})
		text := out.String()
		if code != 0 || !strings.Contains(text, want) || strings.Contains(text, "10.1.0.4") ||
			!strings.Contains(text, "endpoint: 10.1.0.2:8080 on node \"\", source kept, weight 2 (66.7 %)\n") {
			t.Errorf("mode %s: exit status %d, output:\n%s%s", mode, code, text, diag.String())
		}
	}
}

// TestExplainSurvivesOddNames uses names that no API server accepts, and one that is longer
// than what the kernel stores.
func TestExplainSurvivesOddNames(t *testing.T) {
	t.Parallel()
	s := newSite(t)
	dir := t.TempDir()
	names := map[string]string{"10.96.0.10:80": `"na\e[31mme\nX\u202e"`, "10.96.0.11:80": `"` + strings.Repeat("s", 63) + `"`}
	const namespace = `"n\e]0;pwn\as-nnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnn"`
	var objects []string
	for vip, name := range names {
		ip, _, _ := strings.Cut(vip, ":")
		objects = append(objects, "apiVersion: v1\nkind: Service\nmetadata: {name: "+name+", namespace: "+namespace+"}\nspec: {clusterIP: "+ip+", ports: [{name: p, port: 80, protocol: TCP}]}\n",
			"apiVersion: discovery.k8s.io/v1\nkind: EndpointSlice\nmetadata: {name: s"+ip+", namespace: "+namespace+", labels: {kubernetes.io/service-name: "+name+"}}\naddressType: IPv4\nports: [{name: p, port: 8080, protocol: TCP}]\nendpoints: [{addresses: ["+podIPs[0]+"], nodeName: n1}]\n")
	}
	put(t, dir, "all.yaml", strings.Join(objects, "---\n"))
	for _, mode := range explainedModes {
		needMode(t, mode)
		p := embed(t, s.Node, "run", "--manifests", dir, "--hostname-override", "n1", "--min-sync-period", "0s", "--proxy-mode", mode)
		p.synced(t, "services=2 endpoints=2 changed=2")
		for vip := range names {
			code, out, log := verb(t, s.Node, "explain", "--manifests", dir, "--hostname-override", "n1", "--proxy-mode", mode, "--from", "192.0.2.9", vip)
			text := strings.Join(out, "\n")
			if code != 0 || !strings.Contains(text, "kernel: agrees") || text != strings.Map(func(r rune) rune {
				if r < ' ' && r != '\n' || r == '\u202e' {
					return -1
				}
				return r
			}, text) || strings.Contains(text, "\nX") {
				t.Errorf("mode %s: %s: exit status %d:\n%q\n%s", mode, vip, code, text, log)
			}
		}
		p.stop(t)
		cleanup(t, s.Node)
	}
}
