package iptables

import (
	"errors"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"github.com/go-proxier/proxier/internal/testing/must"
	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/ruleset/dataplane"
	"github.com/go-proxier/proxier/tracker"

	v1 "k8s.io/api/core/v1"
)

// TestKubeProxyCanCleanUp deletes the rules of many Services as "kube-proxy --cleanup" does: its
// jumps from the kernel's own chains, and in one transaction for each table the chains that it
// recognizes by name or prefix. A chain that only this package has must not refer to one of them.
func TestKubeProxyCanCleanUp(t *testing.T) {
	t.Parallel()
	jumps := map[string][]string{
		"filter": {
			"INPUT KUBE-EXTERNAL-SERVICES", "FORWARD KUBE-EXTERNAL-SERVICES", "INPUT KUBE-NODEPORTS", "FORWARD KUBE-SERVICES", "OUTPUT KUBE-SERVICES",
			"FORWARD KUBE-FORWARD", "INPUT KUBE-PROXY-FIREWALL", "OUTPUT KUBE-PROXY-FIREWALL", "FORWARD KUBE-PROXY-FIREWALL",
		},
		"nat": {"OUTPUT KUBE-SERVICES", "PREROUTING KUBE-SERVICES", "POSTROUTING KUBE-POSTROUTING"},
	}
	chains := map[string][]string{
		"filter": {"KUBE-SERVICES", "KUBE-EXTERNAL-SERVICES", "KUBE-FORWARD", "KUBE-NODEPORTS", "KUBE-PROXY-FIREWALL", "KUBE-PROXY-CANARY"},
		"nat":    {"KUBE-SERVICES", "KUBE-NODEPORTS", "KUBE-POSTROUTING", "KUBE-MARK-MASQ", "KUBE-PROXY-CANARY"},
	}
	prefixes := []string{"KUBE-SVC-", "KUBE-SVL-", "KUBE-SEP-", "KUBE-FW-", "KUBE-EXT-"} // in table nat
	systems(t, func(t *testing.T, flavor system) {
		t.Parallel()
		r := newRig(t, flavor, onlyIPv4, func(c *Config) { c.LocalhostNodePorts = true })
		r.everyKind()
		for i := range 120 {
			r.set(100+i, []int{1}, nodePort(30100+int32(i)))
		}
		r.set(300, upTo(40))
		r.set(301, upTo(40), externalLocal, nodePort(30301))
		r.sync()
		known := func(table, chain string) bool {
			return slices.Contains(chains[table], chain) ||
				table == "nat" && slices.ContainsFunc(prefixes, func(p string) bool { return strings.HasPrefix(chain, p) })
		}
		for _, table := range []string{"filter", "nat"} {
			for line := range strings.Lines(r.command(tracker.IPv4, "-save", "-t", table)) {
				words := strings.Fields(line)
				if words[0] == "-A" && slices.Contains(jumps[table], words[1]+" "+words[len(words)-1]) {
					r.command(tracker.IPv4, "-restore", "--noflush", r.file("*"+table, "-D"+strings.TrimPrefix(strings.TrimSpace(line), "-A"), "COMMIT"))
				}
			}
			var flushed, deleted []string
			for line := range strings.Lines(r.command(tracker.IPv4, "-save", "-t", table)) {
				if chain, ok := strings.CutPrefix(strings.Fields(line)[0], ":"); ok && known(table, chain) {
					flushed, deleted = append(flushed, ":"+chain+" - [0:0]"), append(deleted, "-X "+chain)
				}
			}
			if len(deleted) < 5 {
				t.Fatalf("table %s: only %d chains, want those of kube-proxy", table, len(deleted))
			}
			r.command(tracker.IPv4, "-restore", "--noflush", r.file(slices.Concat([]string{"*" + table}, flushed, deleted, []string{"COMMIT"})...))
		}
		// What is left is reached only by the guard of the loopback range, which kubelet has, too.
		for line := range strings.Lines(r.command(tracker.IPv4, "-save")) {
			words := strings.Fields(line)
			if words[0] == "-A" && !strings.HasPrefix(words[1], "KUBE-") && words[len(words)-1] != chainLocalnet {
				t.Errorf("after the clean-up: %s", line)
			}
		}
	})
}

// TestCleanupRefusesNoForwardedConnection sends packets after each input of a clean-up. What is not forwarded any more may
// be taken by another data plane in INPUT.
func TestCleanupRefusesNoForwardedConnection(t *testing.T) {
	t.Parallel()
	inMemory(t, func(t *testing.T, r *rig, m *memory) {
		r.set(1, []int{1, 2}, nodePort(30080), externalIPs)
		r.sync()
		tables := m.tables[tracker.IPv4]
		var seen []ruleset.Action
		tables.After = func(string) error {
			for _, to := range []string{"10.96.0.1:80", "192.0.2.1:30080", "198.51.100.1:80"} {
				p := ruleset.Packet{From: netip.MustParseAddr("192.0.2.9"), To: netip.MustParseAddrPort(to), Protocol: v1.ProtocolTCP, InInterface: "eth0",
					NodeAddresses: []netip.Addr{netip.MustParseAddr("192.0.2.1"), netip.MustParseAddr("198.51.100.1")}}
				out := tables.Handle(p).Action
				if out != ruleset.ActionForward && out != ruleset.ActionPass {
					t.Errorf("after input %d: %s: %v", len(seen)/3, to, out)
				}
				seen = append(seen, out)
			}
			return nil
		}
		must.Do(t, r.cleanup())
		if !slices.Contains(seen, ruleset.ActionForward) || !slices.Contains(seen, ruleset.ActionPass) {
			t.Errorf("the packets saw %v, want that they are forwarded first and then pass", seen)
		}
	})
}

// TestFailedCleanupNamesFamily uses a program that cannot read the tables.
func TestFailedCleanupNamesFamily(t *testing.T) {
	t.Parallel()
	inMemory(t, func(t *testing.T, r *rig, m *memory) {
		m.set("save6", "")
		err := r.cleanup()
		var failed *CommandError
		if !errors.As(err, &failed) || !strings.Contains(err.Error(), "cannot clean up IPv6") {
			t.Errorf("%v", err)
		}
	})
}

func TestOnlyBackendRulesAreOwned(t *testing.T) {
	t.Parallel()
	systems(t, func(t *testing.T, flavor system) {
		r := newRig(t, flavor, onlyIPv4)
		owned := func(what string, want bool) {
			t.Helper()
			if got, err := r.owned(); err != nil || got != want {
				t.Errorf("%s: %v, error %v", what, got, err)
			}
		}
		owned("empty tables", false)
		for _, args := range []string{"-N KUBE-PROXY-CANARY", "-N KUBE-SERVICES", "-A OUTPUT -j KUBE-SERVICES"} {
			r.command(tracker.IPv4, "", strings.Fields(args)...)
		}
		owned("kube-proxy's rules", false)
		r.sync()
		owned("a Backend's rules", true)
		must.Do(t, r.cleanup())
		owned("after Cleanup", false)
	})
}

// TestEmptiedChainsAreNoProxy cleans up while another program's rule leads to KUBE-SERVICES.
func TestEmptiedChainsAreNoProxy(t *testing.T) {
	t.Parallel()
	systems(t, func(t *testing.T, flavor system) {
		for _, table := range []string{"filter", "nat"} {
			r := newRig(t, flavor, onlyIPv4)
			foreign := func(what string, want bool) {
				t.Helper()
				if got, err := r.foreign(); err != nil || got != want {
					t.Errorf("table %s, %s: %v, error %v", table, what, got, err)
				}
			}
			// kube-proxy's chain of table filter is empty while every Service has endpoints.
			r.command(tracker.IPv4, "-restore", "--noflush", r.file("*filter", ":KUBE-SERVICES - [0:0]", "COMMIT",
				"*nat", ":KUBE-SERVICES - [0:0]", "-A KUBE-SERVICES -j RETURN", "COMMIT"))
			foreign("kube-proxy's rules", true)
			r.sync()
			foreign("a Backend's rules", false)
			r.command(tracker.IPv4, "-restore", "--noflush", r.file("*"+table, ":OTHER - [0:0]", "-A OTHER -p tcp -j KUBE-SERVICES", "COMMIT"))
			must.Do(t, r.cleanup())
			if saved := r.command(tracker.IPv4, "-save", "-t", table); !strings.Contains(saved, ":KUBE-SERVICES") {
				t.Fatalf("the chain that another rule leads to is gone:\n%s", saved)
			}
			foreign("after Cleanup", false)
			if _, err := r.lookup(dataplane.Query{Packet: ruleset.Packet{To: netip.MustParseAddrPort("10.96.0.1:80")}}); !errors.Is(err, dataplane.ErrNoRules) {
				t.Errorf("Lookup after Cleanup returned %v", err)
			}
			if _, err := r.traffic(); !errors.Is(err, dataplane.ErrNoRules) {
				t.Errorf("Traffic after Cleanup returned %v", err)
			}
		}
	})
}
