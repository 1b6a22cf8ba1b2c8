package iptables

import (
	"context"
	"errors"
	"fmt"
	"hash/maphash"
	"slices"

	"github.com/go-proxier/proxier/tracker"
)

// The sysctls that the backend uses (Documentation/networking/ip-sysctl.rst and nf_conntrack-sysctl.rst of the
// kernel), in the namespace of the thread that opens them.
const (
	routeLocalnet = "net/ipv4/conf/all/route_localnet"
	tcpBeLiberal  = "net/netfilter/nf_conntrack_tcp_be_liberal"
)

// SetSysctls sets net.ipv4.conf.all.route_localnet to 1, in the network namespace that c names, if c has
// LocalhostNodePorts and the family IPv4, after it has written the chain KUBE-PROXY-LOCALNET, which keeps packets of
// other hosts from the loopback range. Otherwise, if a [Backend] or SetSysctls has set the sysctl, SetSysctls sets it
// back to 0 and deletes the chain. A full delta of a Backend does the same.
//
// SetSysctls is for a privileged process that runs before a Backend in a process that may not write /proc/sys. It
// writes a sysctl only if its value differs. The error wraps [ruleset.ErrConfig] if c is invalid, and is a
// [*dataplane.UnsupportedError] if a program is missing; other errors are the system's.
func SetSysctls(ctx context.Context, c Config) error {
	return c.with(func(c Config, k kernel) error { return setSysctls(ctx, c, k) })
}

func setSysctls(ctx context.Context, c Config, k kernel) error {
	if !slices.Contains(c.Families, tracker.IPv4) {
		return nil
	}
	if !c.LocalhostNodePorts && k.Sysctl(routeLocalnet) == "0" {
		return nil // no program is needed
	}
	c.Families = []tracker.Family{tracker.IPv4}
	return each(ctx, c, k, func(f *family) (err error) {
		f.localhost = c.LocalhostNodePorts
		r := &replacement{seed: maphash.MakeSeed(), family: f}
		if r.found[filter], err = f.readKernel(ctx, filter, r.seed); err != nil {
			return err
		}
		unset, err := r.guardLoopback(ctx)
		if !r.guarded && err == nil {
			err = r.dropGuard(ctx, r.found[filter])
		}
		return errors.Join(unset, err)
	})
}

func setSysctl(k kernel, name, value string) error {
	if err := k.SetSysctl(name, value); err != nil {
		return fmt.Errorf("iptables: %w", err)
	}
	return nil
}
