//go:build linux

package iptables

import (
	"fmt"
	"slices"

	"github.com/go-proxier/proxier/internal/netns"
	"github.com/go-proxier/proxier/internal/sysctl"
	"github.com/go-proxier/proxier/tracker"
)

// The sysctls that the backend uses: Documentation/networking/ip-sysctl.rst and
// nf_conntrack-sysctl.rst of the kernel. They belong to the namespace of the thread that
// opens them.
const (
	routeLocalnet = "net/ipv4/conf/all/route_localnet"
	tcpBeLiberal  = "net/netfilter/nf_conntrack_tcp_be_liberal"
)

// SetSysctls sets the sysctl that a full delta sets for a configuration, unless it has
// its value already: net.ipv4.conf.all.route_localnet to 1 if c asks for
// LocalhostNodePorts, in the network namespace that c names. Otherwise it does nothing.
// It is for a process that may write /proc/sys and runs before one that may not: the
// [Backend] of the second then finds it set. The sysctl lets packets from the node's
// neighbours reach its loopback addresses until that Backend has written its rules.
// The error is of the configuration, or the system's.
func SetSysctls(c Config) error {
	c, err := c.withDefaults()
	if err != nil {
		return err
	}
	if !c.LocalhostNodePorts || !slices.Contains(c.Families, tracker.IPv4) {
		return nil
	}
	ns, err := netns.Open(c.NetNS)
	if err != nil {
		return fmt.Errorf("iptables: %w", err)
	}
	defer ns.Close()
	return setSysctl(ns.Do, routeLocalnet, "1")
}

// sysctl returns a sysctl's value, "" if there is none.
func (t tool) sysctl(name string) string {
	value := ""
	// What cannot be read has its default.
	_ = t.Do(func() (err error) { value, err = sysctl.Get(name); return err })
	return value
}

// setSysctl sets a sysctl in the namespace of do.
func setSysctl(do func(func() error) error, name, value string) error {
	if err := do(func() error { return sysctl.Set(name, value) }); err != nil {
		return fmt.Errorf("iptables: %w", err)
	}
	return nil
}
