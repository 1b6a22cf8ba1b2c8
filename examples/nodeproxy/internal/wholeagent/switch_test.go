//go:build linux

package wholeagent

import (
	"maps"
	"slices"
	"strings"
	"syscall"
	"testing"

	"github.com/go-proxier/proxier/examples/nodeproxy/internal/lab"
	"github.com/go-proxier/proxier/internal/testing/must"
	"github.com/go-proxier/proxier/internal/testing/netlab"
)

// needMode skips the test unless this machine supports a mode.
func needMode(t *testing.T, mode string) {
	t.Helper()
	programs := map[string][]string{
		"iptables": {"iptables-restore", "iptables-save", "ip6tables-restore", "ip6tables-save"},
	}[mode]
	netlab.NeedPrograms(t, programs...)
}

// rules reports for each mode whether a node has rules of it.
func rules(t *testing.T, h *netlab.Host) map[string]bool {
	t.Helper()
	out := map[string]bool{}
	list := func(name string, args ...string) string {
		t.Helper()
		// A listing may fail because of a concurrent change.
		var text string
		eventually(t, name, func() (ok bool) {
			var err error
			text, err = h.Run(t, name, args...)
			return err == nil
		})
		return text
	}
	listing := list("nft", "list", "tables")
	out["nftables"] = strings.Contains(listing, "table ip proxier\n")
	out["kube-proxy nftables"] = strings.Contains(listing, "table ip kube-proxy\n") && slices.ContainsFunc(chainsOfKubeProxy(t, h, "ip"), func(chain string) bool { return chain != "nodeproxy-marker" })
	out["userspace"] = strings.Contains(listing, "table ip proxier-kept\n")
	saved := list("iptables-save")
	out["iptables"] = strings.Contains(saved, "\n:KUBE-SERVICES ")
	out["ipvs"] = strings.Contains(saved, "\n:KUBE-IPVS-SERVICES ")
	out["kube-proxy iptables"] = strings.Contains(saved, "\n:KUBE-SVC-OLD")
	return out
}

// held opens some more connections and checks that none has failed.
func held(t *testing.T, s *lab.Stream, when string) {
	t.Helper()
	s.Next(20)
	if errs := s.Errs(); len(errs) != 0 {
		t.Errorf("%s: %d connections failed, first: %v", when, len(errs), errs[0])
	}
}

// TestSwitchingModesBreaksNoConnection changes the mode several times by restarts, while
// connections are opened all the time and one stays open.
func TestSwitchingModesBreaksNoConnection(t *testing.T) {
	t.Parallel()
	switchModes(t, "nftables", "iptables", "nftables", "iptables", "nftables")
}

// TestSwitchingToUserspaceBreaksNoConnection has an open connection that the kernel translates.
func TestSwitchingToUserspaceBreaksNoConnection(t *testing.T) {
	t.Parallel()
	for _, first := range []string{"nftables", "iptables"} {
		t.Run(first, func(t *testing.T) {
			t.Parallel()
			switchModes(t, first, "userspace")
		})
	}
}

// switchModes changes from the first mode to the others, one after the other. TestIPVSNode does it with mode ipvs.
func switchModes(t *testing.T, first string, others ...string) {
	t.Helper()
	needMode(t, "iptables")
	netlab.NeedPrograms(t, "nft")
	s, dir := webSite(t, podIPs...)
	run := func(mode string, more ...string) *process {
		t.Helper()
		args := append([]string{"run", "--manifests", dir, "--hostname-override", "n1", "--min-sync-period", "0s", "--proxy-mode", mode}, more...)
		p := start(t, s.Node, args...)
		p.synced(t, "services=1 endpoints=3 changed=1")
		return p
	}
	kept := "" // a mode whose rules may stay until its connections have ended
	tidied := func(what string, want ...string) {
		t.Helper()
		eventually(t, what+": only its own rules are left", func() bool {
			got := rules(t, s.Node)
			for kind, there := range got {
				if kind != kept && there != slices.Contains(want, kind) {
					return false
				}
			}
			return true
		})
	}
	p := run(first)
	if first == "ipvs" {
		// Without connections mode ipvs is removed immediately.
		p.kill(t)
		p = run("nftables")
		tidied("nftables", "nftables")
		p.kill(t)
		p = run(first)
		tidied(first, first)
	}
	long := talk(t, s.Client, nodePort)
	name, _, err := long.Ask()
	must.Do(t, err)
	stream := s.stream()
	for i, mode := range others {
		stream.Next(20)
		if i%2 == 0 {
			p.Process.Signal(syscall.SIGTERM)
		} else {
			p.Process.Kill()
		}
		p.exit(t)
		held(t, stream, "while no agent runs, before mode "+mode)
		p = run(mode)
		held(t, stream, "when mode "+mode+" comes into effect")
		want := []string{mode}
		if first == "ipvs" {
			want = []string{mode, first} // the open connection belongs to the first mode
		} else if mode == "ipvs" {
			kept = mode
		}
		tidied(mode, want...)
		held(t, stream, "when the other rules are removed, in mode "+mode)
		s.answeredBy(t, clusterVIP, podIPs...)
		if again, _, err := long.Ask(); err != nil || again != name {
			t.Fatalf("in mode %s the old connection to %s is answered by %q, error %v", mode, name, again, err)
		}
	}
	held(t, stream, "at the end")
	stream.Stop()
	p.stop(t)
	cleanup(t, s.Node)
	if left := rules(t, s.Node); slices.Contains(slices.Collect(maps.Values(left)), true) {
		t.Errorf("cleaned up: %v", left)
	}
}
