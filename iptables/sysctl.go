//go:build linux

package iptables

import (
	"context"
	"errors"
	"fmt"
	"hash/maphash"
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
// names, if c has LocalhostNodePorts and the family IPv4. It first writes the chain
// KUBE-PROXY-LOCALNET, which keeps packets of other hosts from the loopback range, with
// the programs that c selects. Otherwise, if a [Backend] or SetSysctls has set the sysctl in
// another configuration, SetSysctls sets it back to 0 and deletes the chain. A full delta of a
// Backend does the same.
//
// SetSysctls is for a privileged process that runs before a Backend in a process that may
// not write /proc/sys. It writes a sysctl only if its value differs. The error wraps
// [ruleset.ErrConfig] if c is invalid, and is a [*ruleset.UnsupportedError] if a program is
// missing that SetSysctls needs; other errors are the system's.
func SetSysctls(ctx context.Context, c Config) error {
	c, ns, err := c.open()
	if err != nil {
		return err
	}
	defer ns.Close()
	if !slices.Contains(c.Families, tracker.IPv4) {
		return nil
	}
	if !c.LocalhostNodePorts && readSysctl(ns.Do, routeLocalnet) == "0" {
		return nil // no program is needed
	}
	t, err := findTool(ctx, c, tracker.IPv4, ns)
	if err != nil {
		return err
	}
	r := &replacement{seed: maphash.MakeSeed(), family: &family{
		settings: &settings{family: tracker.IPv4, localhost: c.LocalhostNodePorts}, tool: t, log: c.Log, limit: firstLimit(t),
	}}
	if r.kernel[filter], err = t.readKernel(ctx, filter, r.seed); err != nil {
		return err
	}
	unset, err := r.guardLoopback(ctx)
	if !r.guarded && err == nil {
		err = r.dropGuard(ctx, r.kernel[filter])
	}
	return errors.Join(unset, err)
}

// sysctl returns a sysctl's value, or "" if it cannot be read.
func (t tool) sysctl(name string) string { return readSysctl(t.Do, name) }

// readSysctl returns a sysctl's value in the namespace of do, or "" if it cannot be read.
func readSysctl(do func(func() error) error, name string) string {
	value := ""
	_ = do(func() (err error) { value, err = sysctl.Get(name); return err })
	return value
}

// setSysctl sets a sysctl in the namespace of do.
func setSysctl(do func(func() error) error, name, value string) error {
	if err := do(func() error { return sysctl.Set(name, value) }); err != nil {
		return fmt.Errorf("iptables: %w", err)
	}
	return nil
}
