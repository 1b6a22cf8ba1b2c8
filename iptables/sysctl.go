//go:build linux

package iptables

import (
	"fmt"
	"os"
	"slices"
	"strings"

	"github.com/go-proxier/proxier/tracker"
)

// The sysctls that matter here: Documentation/networking/ip-sysctl.rst and
// nf_conntrack-sysctl.rst of the kernel. They are those of the namespace of the
// thread that opens them.
const (
	routeLocalnet = "/proc/sys/net/ipv4/conf/all/route_localnet"
	tcpBeLiberal  = "/proc/sys/net/netfilter/nf_conntrack_tcp_be_liberal"
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
	t := &tool{netns: -1}
	if c.NetNS != 0 {
		t.netns = c.NetNS
	}
	return t.setSysctl(routeLocalnet, "1")
}

// sysctl returns a sysctl's value, "" if there is none.
func (t *tool) sysctl(path string) string {
	value := ""
	// What cannot be read has its default.
	_ = t.within(func() error {
		b, err := os.ReadFile(path)
		value = strings.TrimSpace(string(b))
		return err
	})
	return value
}

// setSysctl sets a sysctl that is not as it should be.
func (t *tool) setSysctl(path, value string) error {
	if t.sysctl(path) == value {
		return nil
	}
	if err := t.within(func() error { return os.WriteFile(path, []byte(value), 0) }); err != nil {
		return fmt.Errorf("iptables: sysctl: %w", err)
	}
	return nil
}
