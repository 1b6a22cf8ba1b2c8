//go:build linux

package wholeagent

import (
	"strings"
	"testing"

	"github.com/go-proxier/proxier/internal/testing/netlab"
)

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
			s := newSite(t)
			dir := t.TempDir()
			put(t, dir, "web.yaml", webService+"---\n"+webSlice(podIPs[0]))
			lock := "XTABLES_LOCKFILE=" + dir + "/lock"
			p := startWith(t, s.Node, []string{lock, "PATH=" + flavorPath(t, flavor)},
				"run", "--manifests", dir, "--hostname-override", "n1", "--proxy-mode", "iptables")
			p.synced(t, "services=1 endpoints=1 changed=1")
			s.answeredBy(t, clusterVIP, podIPs[0])
			p.Process.Kill()
			p.exit(t)
			chains := func() int {
				text, err := s.Node.Output("env", lock, "iptables-"+flavor+"-save")
				if err != nil {
					t.Fatal(err)
				}
				return strings.Count(text, "\n:KUBE-")
			}
			if chains() == 0 {
				t.Fatalf("the agent has not used iptables-%s", flavor)
			}
			c := startWith(t, s.Node, []string{lock}, "run", "--cleanup")
			if code, _ := c.exit(t); code != 0 {
				t.Errorf("--cleanup: exit status %d, log:\n%s", code, c.log())
			}
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
