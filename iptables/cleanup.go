//go:build linux

package iptables

import (
	"bytes"
	"context"
	"fmt"
	"hash/maphash"
	"slices"
	"strings"
)

// Cleanup removes, in all families of the configuration, the chains that a
// [Backend] or kube-proxy in iptables mode may have left in the tables filter and
// nat, and the rules in the kernel's own chains that lead to them. If it found any, it
// also removes kube-proxy's canary in mangle. It deletes the objects of
// [Backend.Counters] that no rule counts into any more.
//
// Cleanup touches nothing else. A chain that another program's chain leads to stays:
// KUBE-MARK-MASQ and KUBE-POSTROUTING with their rules, others without. KUBE-FIREWALL is
// kubelet's. Translated connections stay as they are, and so does the sysctl
// route_localnet. If there is nothing to remove, Cleanup returns nil. The error is a
// [*ruleset.UnsupportedError] if a program is missing.
func Cleanup(ctx context.Context, c Config) error {
	c, err := c.each(ctx, func(f *family) error {
		if err := f.cleanup(ctx); err != nil {
			return fmt.Errorf("iptables: cannot clean up %v: %w", f.family, err)
		}
		return nil
	})
	if err == nil {
		deleteCounters(c)
	}
	return err
}

// Owned reports whether a [Backend] has programmed the tables, in any family of the
// configuration. If not, chains of the same names are kube-proxy's, which [Cleanup] would
// remove, too. The error is a [*ruleset.UnsupportedError] if a program is missing.
func Owned(ctx context.Context, c Config) (owned bool, err error) {
	_, err = c.each(ctx, func(f *family) error {
		// Every table has a canary, and filter is the smaller one.
		k, err := f.tool.readKernel(ctx, filter, maphash.MakeSeed())
		owned = owned || err == nil && slices.ContainsFunc(k.canary, isCanary)
		return err
	})
	return owned, err
}

// each calls fn for each family of the configuration until fn fails. It returns c with its
// defaults.
func (c Config) each(ctx context.Context, fn func(*family) error) (Config, error) {
	c, ns, err := c.open()
	if err != nil {
		return c, err
	}
	defer ns.Close()
	for _, fam := range c.Families {
		t, err := findTool(ctx, c, fam, ns)
		if err == nil {
			err = fn(&family{settings: &settings{family: fam}, tool: t, log: c.Log, limit: firstLimit(t)})
		}
		if err != nil {
			return c, err
		}
	}
	return c, nil
}

// cleanup removes one family's rules.
func (f *family) cleanup(ctx context.Context) error {
	found := false
	for t := range tables {
		any, err := f.cleanupTable(ctx, t)
		for f.smaller(err) {
			_, err = f.cleanupTable(ctx, t)
		}
		if err != nil {
			return err
		}
		found = found || any
	}
	if !found {
		return nil
	}
	return f.cleanupMangle(ctx)
}

// kernelChains is the kernel's own chains.
var kernelChains = []string{"PREROUTING", "INPUT", "FORWARD", "OUTPUT", "POSTROUTING"}

// cleanupTable removes chains and jumps from a table, and reports whether it found any.
func (f *family) cleanupTable(ctx context.Context, t table) (found bool, err error) {
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
	// A program that uses KUBE-MARK-MASQ needs KUBE-POSTROUTING, too, which the
	// kernel's chain leads to.
	if slices.ContainsFunc(k.hooks, func(h hook) bool {
		return !slices.Contains(kernelChains, h.chain) && strings.HasSuffix(h.rule, jump(chainMarkMasq))
	}) {
		delete(b.drops[t], chainPostrouting)
		commands = slices.DeleteFunc(commands, func(c string) bool { return strings.HasSuffix(c, jump(chainPostrouting)) })
	}
	_, err = f.write(ctx, b.inputs(t, commands, f.limit, nil))
	return found, err
}

// cleanupMangle removes kube-proxy's canary from the table mangle, where kube-proxy has
// nothing else. With iptables-legacy, reading the table creates it.
func (f *family) cleanupMangle(ctx context.Context) error {
	var saved bytes.Buffer
	if err := f.tool.Save(ctx, "mangle", &saved); err != nil || !bytes.Contains(saved.Bytes(), []byte("\n:"+chainCanary+" ")) {
		return err
	}
	in := &input{chains: 1}
	in.add("*mangle")
	in.add("-X ", chainCanary)
	in.add("COMMIT")
	return f.tool.apply(ctx, in)
}
