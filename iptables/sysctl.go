//go:build linux

package iptables

import (
	"fmt"
	"os"
	"strings"
)

// The sysctls that the backend uses: Documentation/networking/ip-sysctl.rst and
// nf_conntrack-sysctl.rst of the kernel. They belong to the namespace of the thread that
// opens them.
const (
	routeLocalnet = "/proc/sys/net/ipv4/conf/all/route_localnet"
	tcpBeLiberal  = "/proc/sys/net/netfilter/nf_conntrack_tcp_be_liberal"
)

// sysctl returns a sysctl's value, "" if it cannot be read.
func (t tool) sysctl(path string) string {
	value := ""
	_ = t.Do(func() error {
		b, err := os.ReadFile(path)
		value = strings.TrimSpace(string(b))
		return err
	})
	return value
}

// setSysctl sets a sysctl unless it has the value.
func (t tool) setSysctl(path, value string) error {
	if t.sysctl(path) == value {
		return nil
	}
	if err := t.Do(func() error { return os.WriteFile(path, []byte(value), 0) }); err != nil {
		return fmt.Errorf("iptables: sysctl: %w", err)
	}
	return nil
}
