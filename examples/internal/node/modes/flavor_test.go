package modes

import (
	"errors"
	"strings"
	"testing"

	"github.com/go-proxier/proxier/iptables"
)

func TestFlavorIsThatOfTheHost(t *testing.T) {
	type s = flavorState
	missing := errors.New("missing")
	const hint = "KUBE-IPTABLES-HINT"
	for _, tt := range []struct {
		name        string
		nft, legacy flavorState
		usual, want iptables.Flavor
		why         string
	}{
		{"hint in nft", s{hint: hint}, s{rules: 9}, iptables.Legacy, iptables.NFT, hint},
		{"hint in legacy", s{rules: 9}, s{hint: hint}, iptables.NFT, iptables.Legacy, hint},
		{"hint in both", s{hint: hint}, s{hint: hint}, iptables.Legacy, iptables.NFT, hint},
		{"more rules in legacy", s{rules: 2}, s{rules: 9}, iptables.NFT, iptables.Legacy, "it has 9 rules, and iptables-nft has 2"},
		{"more rules in nft", s{rules: 9}, s{rules: 2}, iptables.Legacy, iptables.NFT, "it has 9 rules, and iptables-legacy has 2"},
		{"both empty", s{}, s{}, iptables.NFT, iptables.NFT, "same number"},
		{"both empty on a host with legacy", s{}, s{}, iptables.Legacy, iptables.Legacy, "same number"},
		{"no nft", s{missing: missing}, s{}, iptables.NFT, iptables.Legacy, "iptables-nft cannot be used: missing"},
		{"no legacy", s{}, s{missing: missing}, iptables.Legacy, iptables.NFT, "iptables-legacy cannot be used: missing"},
		{"neither", s{missing: missing}, s{missing: missing}, iptables.NFT, iptables.AnyFlavor, "neither"},
	} {
		if got, why := decide(tt.nft, tt.legacy, func() iptables.Flavor { return tt.usual }); got != tt.want || !strings.Contains(why, tt.why) {
			t.Errorf("%s: %q because %s; want %q because %s", tt.name, got, why, tt.want, tt.why)
		}
	}
}

func TestHintIsAChainOfMangle(t *testing.T) {
	for saved, want := range map[string]string{
		"": "",
		"*mangle\n:PREROUTING ACCEPT [0:0]\n:KUBE-KUBELET-CANARY - [0:0]\nCOMMIT\n":  "KUBE-KUBELET-CANARY",
		"*mangle\n:KUBE-IPTABLES-HINT - [0:0]\n:KUBE-KUBELET-CANARY - [0:0]\nCOMMIT": "KUBE-IPTABLES-HINT",
		"*mangle\n:KUBE-PROXY-CANARY - [0:0]\nCOMMIT\n":                              "",
	} {
		if got := hintIn(saved); got != want {
			t.Errorf("%q has the hint %q, want %q", saved, got, want)
		}
	}
}

func TestDropOfForwardedPacketsIsFound(t *testing.T) {
	const accepts, refuses = "# x\n*filter\n:INPUT DROP [0:0]\n:FORWARD ACCEPT [5:300]\n", "# x\n*filter\n:FORWARD DROP [0:0]\n"
	for saved, want := range map[string]string{
		"":                   "",
		accepts + "COMMIT\n": "",
		refuses + "COMMIT\n": "-P FORWARD DROP",
		accepts + "-A INPUT -j DROP\n-A FORWARD -i eth1 -j DROP\n-A FORWARD -m conntrack --ctstate INVALID -j DROP\n": "",
		accepts + "-A FORWARD -i eth1 -j ACCEPT\n-A FORWARD -j REJECT --reject-with icmp-host-prohibited\nCOMMIT\n":   "-A FORWARD -j REJECT --reject-with icmp-host-prohibited",
		accepts + "-A FORWARD -m comment --comment \"the rest\" -j DROP\n":                                            "-A FORWARD -m comment --comment \"the rest\" -j DROP",
	} {
		if got := dropIn(saved); got != want {
			t.Errorf("%q drops by %q, want %q", saved, got, want)
		}
	}
}
