//go:build linux

package iptables

import (
	"context"
	"errors"
	"fmt"
	"hash/maphash"
	"slices"
	"strings"

	"golang.org/x/sys/unix"
)

// Cleanup removes, in all families of the configuration, the chains that a
// [Backend] or kube-proxy in iptables mode may have left in the tables filter and
// nat, and the rules in the kernel's own chains that lead to them. Nothing else is
// touched: a chain that somebody else's chain leads to stays, KUBE-MARK-MASQ and
// KUBE-POSTROUTING with what they hold and others empty; KUBE-FIREWALL is kubelet's.
// That there is nothing is no error. Connections that were translated stay as they
// are, and so does the sysctl route_localnet.
func Cleanup(ctx context.Context, c Config) error {
	c, err := c.withDefaults()
	if err != nil {
		return err
	}
	netns := -1
	if c.NetNS != 0 {
		if netns, err = unix.FcntlInt(uintptr(c.NetNS), unix.F_DUPFD_CLOEXEC, 3); err != nil {
			return fmt.Errorf("iptables: network namespace: %w", err)
		}
		defer unix.Close(netns)
	}
	for _, fam := range c.Families {
		t, err := newTool(ctx, c, fam, netns)
		if err != nil {
			return err
		}
		f := &family{tool: t, log: c.Log, limit: legacyLimit}
		if t.nft {
			f.limit = nftLimit
		}
		for tab := range tables {
			err := f.cleanup(ctx, tab)
			for f.smaller(err) {
				err = f.cleanup(ctx, tab)
			}
			if err != nil {
				return fmt.Errorf("iptables: clean up: %w", err)
			}
		}
	}
	return nil
}

// kernelChains is the chains that rules of the kernel's hooks are in.
var kernelChains = []string{"PREROUTING", "INPUT", "FORWARD", "OUTPUT", "POSTROUTING"}

func (f *family) cleanup(ctx context.Context, t table) error {
	k, err := f.tool.readKernel(ctx, t, maphash.MakeSeed())
	if err != nil {
		return err
	}
	b := newBatch()
	for name := range k.chains {
		b.drop(t, name)
	}
	var commands []string
	for _, h := range k.hooks {
		to := target([]byte(h.rule))
		switch {
		case slices.Contains(kernelChains, h.chain):
			commands = append(commands, "-D "+h.chain+" "+h.rule)
		case to == chainMarkMasq || to == chainPostrouting:
			delete(b.drops[t], to)
		default:
			b.put(chain{table: t, name: to})
		}
	}
	// KUBE-POSTROUTING may be in use by the same owner as KUBE-MARK-MASQ, through
	// the kernel's chain.
	if slices.ContainsFunc(k.hooks, func(h hook) bool {
		return !slices.Contains(kernelChains, h.chain) && strings.HasSuffix(h.rule, jump(chainMarkMasq))
	}) {
		delete(b.drops[t], chainPostrouting)
		commands = slices.DeleteFunc(commands, func(c string) bool { return strings.HasSuffix(c, jump(chainPostrouting)) })
	}
	_, err = f.write(ctx, b.inputs(t, commands, f.limit, nil))
	return errors.Join(err)
}
