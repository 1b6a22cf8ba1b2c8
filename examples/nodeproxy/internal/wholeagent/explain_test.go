//go:build linux

package wholeagent

import (
	"context"
	"fmt"
	"strings"
	"testing"

	"github.com/go-proxier/proxier/examples/nodeproxy/internal/lab"
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
