//go:build linux

package wholeagent

import (
	"strings"
	"testing"

	"github.com/go-proxier/proxier/internal/testing/must"
	"github.com/go-proxier/proxier/internal/testing/netlab"
)

// TestFlavorOfHostIsUsed runs mode iptables on a host whose kubelet and container runtime use
// iptables-legacy.
func TestFlavorOfHostIsUsed(t *testing.T) {
	t.Parallel()
	testFlavor(t, "iptables")
}

// testFlavor starts the agent with the wrong flavor, with the right one after it, and cleans up.
func testFlavor(t *testing.T, mode string) {
	for _, flavor := range []string{"nft", "legacy"} {
		needFlavor(t, flavor)
	}
	s := newSite(t)
	dir := t.TempDir()
	node := func(args ...string) string {
		t.Helper()
		out := must.Get(s.Node.Output(args[0], args[1:]...))(t)
		return out
	}
	chains := func(program string) int { return strings.Count(node(program+"-save"), "\n:KUBE-") }
	// As docker and kubelet do.
	node("iptables-legacy", "-P", "FORWARD", "DROP")
	node("iptables-legacy", "-A", "FORWARD", "-m", "conntrack", "--ctstate", "RELATED,ESTABLISHED", "-j", "ACCEPT")
	node("iptables-legacy", "-t", "mangle", "-N", "KUBE-IPTABLES-HINT")
	rollOut(t, dir, podIPs[0])
	run := func(args ...string) *process {
		t.Helper()
		p := embed(t, s.Node, append([]string{"run", "--manifests", dir, "--hostname-override", "n1", "--proxy-mode", mode}, args...)...)
		p.synced(t, "services=1 endpoints=1 changed=1")
		return p
	}

	p := run("--iptables-flavor", "nft")
	p.logged(t, "give --iptables-flavor=legacy")
	p.logged(t, "-P FORWARD DROP")
	if mode == "iptables" { // in mode ipvs, requests do not pass FORWARD
		s.unanswered(t, nodePort)
	}
	p.stop(t)
	if chains("iptables-nft") == 0 {
		t.Error("--iptables-flavor nft has no effect")
	}

	p = run()
	p.logged(t, "KUBE-IPTABLES-HINT")
	if strings.Contains(p.log(), "give --iptables-flavor") {
		t.Errorf("a warning about the flavor without a reason:\n%s", p.log())
	}
	s.answeredBy(t, nodePort, podIPs[0])
	if n := chains("ip6tables-legacy"); n == 0 {
		t.Error("IPv6 has another flavor")
	}
	eventually(t, "the rules of the other flavor are gone", func() bool { return chains("iptables-nft")+chains("ip6tables-nft") == 0 })
	s.answeredBy(t, nodePort, podIPs[0])
	sysctl := func() string { return strings.TrimSpace(node("cat", "/proc/sys/"+routeLocalnet)) }
	if mode == "iptables" {
		// The new rules took over how to set route_localnet back.
		eventually(t, "NodePorts at loopback addresses are served", func() bool { return sysctl() == "1" })
		eventually(t, "the guard is complete", func() bool { return strings.Contains(node("iptables-legacy-save"), "route_localnet was 0 before") })
	}
	s.explains(t, dir, mode, 0, "kernel: agrees")
	if code, _, log := verb(t, s.Node, "top", "--once", "--interval", "100ms", "--proxy-mode", mode); code != 0 {
		t.Errorf("top: exit status %d, log:\n%s", code, log)
	}
	if p.loggedErrors() {
		t.Errorf("log:\n%s", p.log())
	}
	p.stop(t)

	// Another mode removes the rules, too.
	p = embed(t, s.Node, "run", "--manifests", dir, "--hostname-override", "n1", "--proxy-mode", "nftables")
	p.synced(t, "services=1 endpoints=1 changed=1")
	eventually(t, "the rules of the other mode are gone", func() bool {
		return chains("iptables-legacy") == 1 && chains("ip6tables-legacy") == 0 && sysctl() == "0" // kubelet's chain stays
	})
	if strings.Contains(p.log(), "kube-proxy") {
		t.Errorf("the agent's own rules count as kube-proxy's:\n%s", p.log())
	}
	p.stop(t)
}

// TestCleanupFindsRulesOfEachFlavor runs --cleanup while the programs without a flavor in
// their names have either flavor. It must not create tables of iptables-legacy.
func TestCleanupFindsRulesOfEachFlavor(t *testing.T) {
	t.Parallel()
	for _, flavor := range []string{"nft", "legacy"} {
		needFlavor(t, flavor)
	}
	for _, flavor := range []string{"nft", "legacy"} {
		t.Run(flavor, func(t *testing.T) {
			t.Parallel()
			s, dir := webSite(t, podIPs[0])
			p := startWith(t, s.Node, []string{"PATH=" + flavorPath(t, flavor)},
				"run", "--manifests", dir, "--hostname-override", "n1", "--proxy-mode", "iptables")
			p.synced(t, "services=1 endpoints=1 changed=1")
			s.answeredBy(t, clusterVIP, podIPs[0])
			p.kill(t)
			chains := func() int {
				text := must.Get(s.Node.Output("iptables-" + flavor + "-save"))(t)
				return strings.Count(text, "\n:KUBE-")
			}
			if chains() == 0 {
				t.Fatalf("the agent has not used iptables-%s", flavor)
			}
			cleanup(t, s.Node)
			if n := chains(); n != 0 {
				t.Errorf("%d chains are left", n)
			}
			if flavor == "nft" {
				// The test itself has only used nft above.
				text, err := s.Node.Output("cat", "/proc/thread-self/net/ip_tables_names")
				if err == nil && text != "" {
					t.Errorf("there are tables of iptables-legacy now: %q", text)
				}
			}
		})
	}
}

// needFlavor skips the test if a flavor of iptables is not installed, or the kernel does
// not support it.
func needFlavor(t *testing.T, flavor string) {
	t.Helper()
	h := netlab.NewHost(t)
	for _, family := range []string{"iptables-", "ip6tables-"} {
		_, err := h.Run(t, family+flavor+"-save", "-t", "nat")
		netlab.Need(t, err == nil, "a working "+family+flavor)
	}
}
