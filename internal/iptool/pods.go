package iptool

import (
	"cmp"
	"fmt"
	"strings"

	"github.com/go-proxier/proxier/internal/inet"
	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/tracker"
)

// maxInterface is the most bytes that an interface's name can have: IFNAMSIZ of
// linux/if.h, less the NUL.
const maxInterface = 15

// PodMatches returns the matches that recognise packets from this node's pods. Every packet
// from a pod satisfies one. Each match is "-i" with an interface's name, in which a "+" at the
// end stands for the rest of the name, or "-s" with a range of sources. The error is about an
// interface's name that cannot be matched.
func PodMatches(l ruleset.LocalTraffic, f tracker.Family) (matches []string, err error) {
	name := cmp.Or(l.Bridge, l.InterfacePrefix)
	if name == "" {
		for _, p := range inet.Prefixes(l.CIDRs, f) {
			matches = append(matches, "-s "+p.String())
		}
		return matches, nil
	}
	// A "+" ends a name for iptables, and some others would need quoting.
	special := func(c rune) bool { return c <= ' ' || c >= 0x7f || strings.ContainsRune(`"'\!/+`, c) }
	if len(name) > maxInterface || name[0] == '-' || strings.ContainsFunc(name, special) {
		return nil, fmt.Errorf("interface name %q cannot be matched", name)
	}
	if l.Bridge == "" && len(name) < maxInterface {
		name += "+"
	}
	return []string{"-i " + name}, nil
}
