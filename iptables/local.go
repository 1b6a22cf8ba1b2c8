//go:build linux

package iptables

import (
	"fmt"
	"net/netip"
	"strings"

	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/tracker"
)

// localTraffic is how packets of this node's pods are told from others: by
// ranges of sources, or by the interface they come in by, "+" standing for the
// rest of its name.
type localTraffic struct {
	cidrs []netip.Prefix
	iface string
}

// localTrafficOf returns what l comes to in one family.
func localTrafficOf(l ruleset.LocalTraffic, f tracker.Family) (localTraffic, error) {
	var out localTraffic
	switch {
	case l.Bridge != "":
		out.iface = l.Bridge
	case l.InterfacePrefix != "":
		out.iface = l.InterfacePrefix
		if len(out.iface) < maxInterface {
			out.iface += "+"
		}
	}
	for i := range out.iface {
		// A "+" ends a name for iptables, and some others would need quoting.
		if c := out.iface[i]; c <= ' ' || c >= 0x7f || strings.IndexByte(`"'\!/`, c) >= 0 || c == '+' && i != len(out.iface)-1 {
			return out, fmt.Errorf("iptables: interface name %q cannot be matched", out.iface)
		}
	}
	if len(out.iface) > maxInterface || strings.HasSuffix(l.Bridge, "+") {
		return out, fmt.Errorf("iptables: interface name %q cannot be matched", out.iface)
	}
	if out.iface != "" {
		return out, nil
	}
	for _, c := range l.CIDRs {
		if tracker.FamilyOf(c.Addr()) == f {
			out.cidrs = append(out.cidrs, c.Masked())
		}
	}
	return out, nil
}

// maxInterface is how long an interface's name may be: IFNAMSIZ in the kernel's
// linux/if.h, less the NUL.
const maxInterface = 15

// matches returns the matches of which one holds for each pod's packet.
func (l localTraffic) matches() []string {
	if l.iface != "" {
		return []string{"-i " + l.iface}
	}
	var out []string
	for _, c := range l.cidrs {
		out = append(out, source(c))
	}
	return out
}
