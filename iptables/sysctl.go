//go:build linux

package iptables

import (
	"fmt"
	"slices"

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

// SetSysctls sets net.ipv4.conf.all.route_localnet to 1, in the network namespace that c
// names, if c has LocalhostNodePorts and the family IPv4. Otherwise, or if the sysctl has
// this value, it does nothing. A full delta of a [Backend] does the same.
//
// SetSysctls is for a privileged process that runs before a Backend in a process that may
// not write /proc/sys. Until that Backend has written its rules, the sysctl lets packets
// from the node's neighbours reach its loopback addresses. The error wraps
// [ruleset.ErrConfig] if c is invalid; other errors are the system's.
func SetSysctls(c Config) error {
	c, ns, err := c.open()
	if err != nil {
		return err
	}
	defer ns.Close()
	if !c.LocalhostNodePorts || !slices.Contains(c.Families, tracker.IPv4) {
		return nil
	}
	return setSysctl(ns.Do, routeLocalnet, "1")
}

// sysctl returns a sysctl's value, or "" if it cannot be read.
func (t tool) sysctl(name string) string {
	value := ""
	// A sysctl that cannot be read counts as one with its default value.
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
