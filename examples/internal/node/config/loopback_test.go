package config

import (
	"fmt"
	"strings"
	"testing"

	"github.com/go-proxier/proxier/tracker"
)

// TestLoopbackNodePortsNeedAnExplicitAddress checks in which families the agent's process
// serves NodePorts, and the note if it does not although the configuration names loopback
// addresses.
func TestLoopbackNodePortsNeedAnExplicitAddress(t *testing.T) {
	const off = "NodePorts do not answer at %s in nodePortAddresses, since %s"
	const gate = "the feature gate KubeProxyNFTablesLocalhostNodePorts is off"
	none, both := "[]", "[IPv4 IPv6]"
	for _, tt := range []struct{ args, want, note string }{
		{"", none, ""},
		{"--nodeport-addresses all", none, ""},
		{"--nodeport-addresses primary", none, ""},
		{"--nodeport-addresses 0.0.0.0/0,::/0", none, ""},
		{"--nodeport-addresses localhost", both, ""},
		{"--nodeport-addresses primary,localhost", both, ""},
		{"--nodeport-addresses all,127.0.0.0/8", "[IPv4]", ""},
		{"--nodeport-addresses ::1/128", "[IPv6]", ""},
		{"--nodeport-addresses 127.0.0.2/32", none, ""},
		{"--nodeport-addresses localhost --feature-gates KubeProxyNFTablesLocalhostNodePorts=true", both, ""},
		{"--nodeport-addresses localhost --feature-gates KubeProxyNFTablesLocalhostNodePorts=false", none, fmt.Sprintf(off, "loopback addresses", gate)},
		{"--nodeport-addresses localhost --feature-gates AllAlpha=false", none, fmt.Sprintf(off, "loopback addresses", gate)},
		{"--proxy-mode ipvs --nodeport-addresses localhost", both, ""},
		{"--proxy-mode iptables", none, ""},
		{"--proxy-mode iptables --nodeport-addresses localhost", "[IPv6]", ""},
		{"--proxy-mode iptables --nodeport-addresses 127.0.0.0/8", none, ""},
		{"--proxy-mode iptables --nodeport-addresses localhost --iptables-localhost-nodeports=false", none, fmt.Sprintf(off, "loopback addresses", "iptables.localhostNodePorts is false")},
		{"--proxy-mode iptables --nodeport-addresses localhost --feature-gates KubeProxyNFTablesLocalhostNodePorts=false", none, fmt.Sprintf(off, "::1", gate)},
	} {
		c := of(t, strings.Fields(tt.args)...)
		if got := fmt.Sprint(c.LoopbackFamilies([]tracker.Family{tracker.IPv4, tracker.IPv6})); got != tt.want {
			t.Errorf("%s: %s, want %s", tt.args, got, tt.want)
		}
		if tt.note == "" {
			wantNotes(t, c)
		} else {
			wantNotes(t, c, tt.note)
		}
	}
	c := of(t, "--nodeport-addresses", "localhost")
	if got := c.LoopbackFamilies([]tracker.Family{tracker.IPv6}); fmt.Sprint(got) != "[IPv6]" {
		t.Errorf("on a node with IPv6 alone: %v", got)
	}
}

// TestModeUserspaceNotesWhatHasNoEffect sets options of rules in the kernel.
func TestModeUserspaceNotesWhatHasNoEffect(t *testing.T) {
	wantNotes(t, of(t, "--proxy-mode", "userspace", "--nodeport-addresses", "localhost", "--iptables-sync-period", "9s"))
	wantNotes(t, of(t, "--proxy-mode", "userspace", "--masquerade-all", "--iptables-masquerade-bit", "3", "--conntrack-min", "5"),
		"--masquerade-all has no effect in mode userspace: endpoints always see an address of the node",
		"--conntrack-min has no effect in mode userspace",
		"--iptables-masquerade-bit has no effect in mode userspace")
	wantNotes(t, ofFile(t, "mode: userspace\nipvs: {scheduler: sh}\ndetectLocalMode: BridgeInterface\ndetectLocal: {bridgeInterface: br0}\n"),
		"in the configuration file: detectLocal.bridgeInterface has no effect in mode userspace",
		"in the configuration file: ipvs.scheduler has no effect in mode userspace",
		"mode userspace is nodeproxy's own: kube-proxy has refused it since Kubernetes 1.26")
}
