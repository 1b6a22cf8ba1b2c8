//go:build linux

package iptables

import (
	"fmt"
	"net/netip"
	"strings"

	"github.com/go-proxier/proxier/internal/inet"
	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/tracker"
)

// localTraffic recognises packets from this node's pods, by ranges of sources or by the
// interface that they arrive at. A "+" at the end stands for the rest of its name.
type localTraffic struct {
	cidrs []netip.Prefix
	iface string
}

// localTrafficOf returns l for one family.
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
	if out.iface == "" {
		out.cidrs = inet.Prefixes(l.CIDRs, f)
	}
	return out, nil
}

// maxInterface is the most bytes that an interface's name can have: IFNAMSIZ of
// linux/if.h, less the NUL.
const maxInterface = 15

// matches returns the matches that recognise pods. Every packet from a pod satisfies one.
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
