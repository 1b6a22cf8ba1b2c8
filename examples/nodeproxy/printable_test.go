package main

import (
	"strings"
	"testing"

	"k8s.io/apimachinery/pkg/types"

	"github.com/go-proxier/proxier/tracker"
)

func TestPrintableIsOneHarmlessLine(t *testing.T) {
	for in, want := range map[string]string{
		"ns/web:p":                 "ns/web:p",
		`node "x", zürich`:         `node "x", zürich`,
		"a\x1b[31m\nX\u202e\a\x00": `a\x1b[31m\nX\u202e\a\x00`,
		"\xff":                     "\ufffd",
	} {
		if got := printable(in); got != want {
			t.Errorf("printable(%q) = %q, want %q", in, got, want)
		}
	}
}

func TestStoredNames(t *testing.T) {
	long := tracker.ServicePortName{NamespacedName: types.NamespacedName{Namespace: strings.Repeat("n", 63), Name: strings.Repeat("s", 63)}, Port: "http"}
	odd := tracker.ServicePortName{NamespacedName: types.NamespacedName{Namespace: "n\x1b", Name: "a\nb c"}, Port: "p"}
	for _, tt := range []struct {
		stored string
		name   tracker.ServicePortName
		want   bool
	}{
		{long.String(), long, true},
		{long.String()[:127], long, true},
		{long.String()[:126], long, false},
		{long.String() + "x", long, false},
		{"n?/a?b c:p", odd, true},
		{"n?/a?b", odd, true}, // iptables
		{"n?/a?c", odd, false},
		{"n?/a", odd, false},
		{"", odd, false},
	} {
		if got := storedAs(tt.stored, tt.name); got != tt.want {
			t.Errorf("storedAs(%q, %q) = %v, want %v", tt.stored, tt.name, got, tt.want)
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
		p := start(t, s.node, "run", "--manifests", dir, "--hostname-override", "n1", "--min-sync-period", "0s", "--proxy-mode", mode)
		p.synced(t, "services=2 endpoints=2 changed=2")
		for vip := range names {
			q := start(t, s.node, "explain", "--manifests", dir, "--hostname-override", "n1", "--proxy-mode", mode, "--from", "192.0.2.9", vip)
			code, out := q.exit(t)
			text := strings.Join(out, "\n")
			if code != 0 || !strings.Contains(text, "kernel: agrees") || text != strings.Map(func(r rune) rune {
				if r < ' ' && r != '\n' || r == '\u202e' {
					return -1
				}
				return r
			}, text) || strings.Contains(text, "\nX") {
				t.Errorf("mode %s: %s: exit status %d:\n%q\n%s", mode, vip, code, text, q.log())
			}
		}
		p.Process.Kill()
		p.exit(t)
		start(t, s.node, "run", "--cleanup").exit(t)
	}
}
