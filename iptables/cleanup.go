//go:build linux

package iptables

import (
	"bytes"
	"context"
	"fmt"
	"hash/maphash"
	"slices"
	"strings"

	"github.com/go-proxier/proxier/internal/netns"
)

// Cleanup removes, in all families of the configuration, the chains that a
// [Backend] or kube-proxy in iptables mode may have left in the tables filter and
// nat, and the rules in the kernel's own chains that lead to them; and where there
// was any, kube-proxy's canary in mangle, and the objects of [Backend.Counters] that
// no rule counts into any more. Nothing else is touched: a chain that somebody else's
// chain leads to stays, KUBE-MARK-MASQ and KUBE-POSTROUTING with what they hold and
// others empty; KUBE-FIREWALL is kubelet's.
// That there is nothing is no error. Connections that were translated stay as they
// are, and so does the sysctl route_localnet.
func Cleanup(ctx context.Context, c Config) error {
	c, err := c.withDefaults()
	if err != nil {
		return err
	}
	ns, err := netns.Open(c.NetNS)
	if err != nil {
		return fmt.Errorf("iptables: %w", err)
	}
	defer ns.Close()
	for _, fam := range c.Families {
		t, err := findTool(ctx, c, fam, ns)
		if err != nil {
			return err
		}
		f := &family{tool: t, log: c.Log, limit: legacyLimit}
		if t.NFT() {
			f.limit = nftLimit
		}
		any := false
		for tab := range tables {
			found, err := f.cleanup(ctx, tab)
			for f.smaller(err) {
				_, err = f.cleanup(ctx, tab)
			}
			if err != nil {
				return fmt.Errorf("iptables: clean up: %w", err)
			}
			any = any || found
		}
		if any {
			if err := f.cleanupMangle(ctx); err != nil {
				return fmt.Errorf("iptables: clean up: %w", err)
			}
		}
	}
	deleteCounters(ns, c.Log)
	return nil
}

// kernelChains is the chains that rules of the kernel's hooks are in.
var kernelChains = []string{"PREROUTING", "INPUT", "FORWARD", "OUTPUT", "POSTROUTING"}

// cleanup removes what is in a table, and reports whether there was anything.
func (f *family) cleanup(ctx context.Context, t table) (found bool, err error) {
	k, err := f.tool.readKernel(ctx, t, maphash.MakeSeed())
	if err != nil {
		return false, err
	}
	found = len(k.chains) != 0
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
	return found, err
}

// cleanupMangle removes kube-proxy's canary from the table mangle, in which it has
// nothing else. With iptables-legacy, to look is to make the table: it is done where
// there was something in the others.
func (f *family) cleanupMangle(ctx context.Context) error {
	var saved bytes.Buffer
	if err := f.tool.Save(ctx, "mangle", &saved); err != nil || !bytes.Contains(saved.Bytes(), []byte("\n:"+chainCanary+" ")) {
		return commandError(err, nil)
	}
	in := &input{chains: 1}
	in.add("*mangle")
	in.add("-X ", chainCanary)
	in.add("COMMIT")
	return f.tool.apply(ctx, in)
}
