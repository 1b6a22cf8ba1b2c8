package modes

import (
	"fmt"
	"log/slog"
	"regexp"
	"strings"

	"github.com/go-proxier/proxier/iptables"
)

// Flavor is the flavor of iptables of modes iptables and ipvs, as [ChooseFlavor] chose it. In mode
// nftables it has only what both flavors drop, and in the other modes it is the zero value.
type Flavor struct {
	Name iptables.Flavor
	// why is the reason, or "" in other modes.
	why string
	// drops is how chain FORWARD of the other flavor, or in mode nftables of either, drops packets.
	drops []string
}

// Log logs the choice, and warns of packets that iptables drops.
func (f Flavor) Log(log *slog.Logger) {
	if f.why == "" {
		for _, what := range f.drops {
			log.Warn("chain FORWARD of iptables drops packets. Mode iptables accepts connections to Services there, mode nftables does not: accept packets to and from pods, as most network plugins do",
				"found", what)
		}
		return
	}
	log.Info("chose the flavor of iptables", "flavor", f.Name, "reason", f.why)
	for _, what := range f.drops {
		log.Warn("chain FORWARD of the other flavor of iptables drops packets, even those that the rules of this agent accept: accept connections to Services there, or give --iptables-flavor="+string(other(f.Name)),
			"flavor", other(f.Name), "found", what)
	}
}

// other returns the other flavor.
func other(f iptables.Flavor) iptables.Flavor {
	if f == iptables.NFT {
		return iptables.Legacy
	}
	return iptables.NFT
}

// flavorState is what a node has of one flavor, in both address families.
type flavorState struct {
	// missing is why the flavor cannot be used, or nil.
	missing error
	// hint is the chain by which kubelet marks the flavor of the host, or "".
	hint string
	// rules is the number of rules. It does not matter if one of the flavors has a hint.
	rules int
}

// decide chooses a flavor as the scripts of kubernetes-sigs/iptables-wrappers do. usual returns the
// flavor of the programs without a flavor in their names.
func decide(nft, legacy flavorState, usual func() iptables.Flavor) (choice iptables.Flavor, why string) {
	switch {
	case nft.missing != nil && legacy.missing != nil:
		return iptables.AnyFlavor, fmt.Sprintf("that of iptables-restore: neither iptables-nft (%v) nor iptables-legacy (%v) can be used", nft.missing, legacy.missing)
	case legacy.missing != nil:
		return iptables.NFT, fmt.Sprintf("iptables-legacy cannot be used: %v", legacy.missing)
	case nft.missing != nil:
		return iptables.Legacy, fmt.Sprintf("iptables-nft cannot be used: %v", nft.missing)
	case nft.hint != "":
		return iptables.NFT, "kubelet has made the chain " + nft.hint + " in it"
	case legacy.hint != "":
		return iptables.Legacy, "kubelet has made the chain " + legacy.hint + " in it"
	case legacy.rules > nft.rules:
		return iptables.Legacy, fmt.Sprintf("it has %d rules, and iptables-nft has %d", legacy.rules, nft.rules)
	case nft.rules > legacy.rules:
		return iptables.NFT, fmt.Sprintf("it has %d rules, and iptables-legacy has %d", nft.rules, legacy.rules)
	}
	return usual(), "iptables-restore has it, and both flavors have the same number of rules"
}

// hints are kubelet's chains.
var hints = []string{"KUBE-IPTABLES-HINT", "KUBE-KUBELET-CANARY"}

// hintIn returns kubelet's chain in the output of iptables-save for the table mangle, or "".
func hintIn(saved string) string {
	for _, hint := range hints {
		if strings.Contains(saved, "\n:"+hint+" ") {
			return hint
		}
	}
	return ""
}

// dropRule matches a rule of chain FORWARD that drops every packet. It may have a comment.
var dropRule = regexp.MustCompile(`(?m)^-A FORWARD (?:-m comment --comment (?:"(?:[^"\\]|\\.)*"|\S+) )?-j (?:DROP|REJECT)(?: .*)?$`)

// dropIn returns the policy or rule by which the chain FORWARD drops all packets that its other rules
// do not accept, or "". saved is the output of iptables-save for the table filter.
func dropIn(saved string) string {
	if rule := dropRule.FindString(saved); rule != "" {
		return rule
	}
	if strings.Contains(saved, "\n:FORWARD DROP ") {
		return "-P FORWARD DROP"
	}
	return ""
}
