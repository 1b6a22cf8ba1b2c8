//go:build linux

package wholeagent

import (
	"encoding/json"
	"slices"
	"strings"
	"testing"

	"github.com/go-proxier/proxier/internal/testing/must"
	"github.com/go-proxier/proxier/internal/testing/netlab"
)

// chainsOfKubeProxy returns the names of the chains in kube-proxy's table of a family. Calico's Felix
// lists them every 15 s, by this command in this form: Services are in nftables if there are any.
func chainsOfKubeProxy(t *testing.T, h *netlab.Host, family string) (out []string) {
	t.Helper()
	// A listing may fail because of a concurrent change.
	var text string
	eventually(t, "nft lists the chains", func() bool {
		var err error
		text, err = h.Run(t, "nft", "--json", "list", "chains", family)
		return err == nil
	})
	var listing struct {
		NFTables []struct{ Chain struct{ Table, Name string } }
	}
	if err := json.Unmarshal([]byte(text), &listing); err != nil {
		t.Fatalf("%v: %s", err, text)
	}
	for _, o := range listing.NFTables {
		if o.Chain.Table == "kube-proxy" {
			out = append(out, o.Chain.Name)
		}
	}
	return out
}

// TestOtherProgramsStillFindKubeProxysTable takes over from kube-proxy's nftables mode. Programs that
// look for its chains must find one at every moment, even after a restart, and none when the agent's
// rules are no longer in nftables.
func TestOtherProgramsStillFindKubeProxysTable(t *testing.T) {
	t.Parallel()
	takeOverTools(t)
	s := newSite(t)
	dir := t.TempDir()
	rollOut(t, dir, podIPs[0])
	startKubeProxy(t, s.Node, "nftables", false, podIPs[0])
	marker := []string{"nodeproxy-marker"}
	marked := func(when string, want []string) {
		t.Helper()
		eventually(t, when, func() bool { return slices.Equal(chainsOfKubeProxy(t, s.Node, "ip"), want) })
	}
	p := embed(t, s.Node, agentArgs(dir, "nftables", "--adopt-from-kube-proxy")...)
	p.synced(t, "services=1 endpoints=1 changed=1")
	eventually(t, "the marker replaces the table", func() bool {
		chains := chainsOfKubeProxy(t, s.Node, "ip")
		if len(chains) == 0 {
			t.Fatalf("there was no chain for a moment; log:\n%s", p.log())
		}
		return slices.Equal(chains, marker)
	})
	s.answeredBy(t, clusterVIP, podIPs[0])
	s.explains(t, dir, "nftables", 0, "kernel: agrees")
	must.Get(s.Node.Run(t, "nft", "flush", "ruleset"))(t)
	marked("a firewall's reload deletes all tables", marker)
	p.stop(t)
	marked("after the agent's end", marker)

	// One agent after the other.
	runs := func(mode, when string, want []string, flags ...string) {
		t.Helper()
		p := embed(t, s.Node, agentArgs(dir, mode, flags...)...)
		p.synced(t, "services=1 endpoints=1 changed=1")
		marked(when, want)
		if flags == nil && mode == "nftables" {
			s.explains(t, dir, mode, 0, "kernel: agrees")
		}
		p.stop(t)
	}
	runs("nftables", "after a restart", marker)
	runs("nftables", "never", nil, "--kube-proxy-table", "never")
	runs("nftables", "always", marker, "--kube-proxy-table", "always")
	runs("iptables", "in mode iptables", nil)
	runs("nftables", "always, once more", marker, "--kube-proxy-table", "always")
	// A kube-proxy's table is not the agent's.
	must.Get(s.Node.Run(t, "nft", "add", "chain", "ip", "kube-proxy", "services"))(t)
	cleanup(t, s.Node)
	marked("--cleanup beside kube-proxy's chain", []string{"nodeproxy-marker", "services"})
	must.Get(s.Node.Run(t, "nft", "delete", "chain", "ip", "kube-proxy", "services"))(t)
	cleanup(t, s.Node)
	marked("--cleanup", nil)

	startKubeProxy(t, s.Node, "nftables", false, podIPs[0])
	runs("nftables", "never, after kube-proxy", nil, "--adopt-from-kube-proxy", "--kube-proxy-table", "never")
	cleanup(t, s.Node)

	// A node that was booted, or is new.
	runs("nftables", "on a node without rules", marker, "--adopt-from-kube-proxy")
	cleanup(t, s.Node)
	startKubeProxy(t, s.Node, "iptables", false, podIPs[0])
	for range 2 {
		p = embed(t, s.Node, agentArgs(dir, "nftables", "--adopt-from-kube-proxy")...)
		p.synced(t, "services=1 endpoints=1 changed=1")
		eventually(t, "the rules of kube-proxy are gone", func() bool {
			text, err := s.Node.Run(t, "iptables-save")
			return err == nil && !strings.Contains(text, "KUBE-SERVICES")
		})
		s.explains(t, dir, "nftables", 0, "kernel: agrees")
		marked("after kube-proxy's mode iptables", nil)
		p.stop(t)
	}
}
