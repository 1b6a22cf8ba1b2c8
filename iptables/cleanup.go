package iptables

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"hash/maphash"
	"log/slog"
	"slices"
	"strings"

	"github.com/go-proxier/proxier/internal/iptext"
	"github.com/go-proxier/proxier/internal/iptool"
)

// Cleanup removes, in all families of the configuration, the chains that a [Backend] or kube-proxy in iptables mode
// may have left in the tables filter and nat, and the rules in the kernel's own chains that lead to them. If it found
// any, it also removes kube-proxy's canary in mangle. It deletes the objects of [Backend.Counters] that no rule
// counts into any more.
//
// A chain that another program's chain leads to stays: KUBE-MARK-MASQ and KUBE-POSTROUTING with their rules, others
// without. KUBE-FIREWALL is kubelet's. Translated connections stay as they are. The error is a
// [*dataplane.UnsupportedError] if a program is missing.
//
// Cleanup sets the sysctl route_localnet back to 0 if a Backend or [SetSysctls] has set it, which ends connections
// from loopback addresses to NodePorts. If the sysctl had been set before, or cannot be set, it stays, and
// KUBE-PROXY-LOCALNET stays to guard the loopback range; a failure is logged.
func Cleanup(ctx context.Context, c Config) error {
	return c.with(func(c Config, k kernel) error { return cleanup(ctx, c, k, (*family).cleanup) })
}

func cleanup(ctx context.Context, c Config, k kernel, one func(*family, context.Context) error) error {
	err := each(ctx, c, k, func(f *family) error {
		if err := one(f, ctx); err != nil {
			return fmt.Errorf("iptables: cannot clean up %v: %w", f.family, err)
		}
		return nil
	})
	if err == nil {
		deleteCounters(c, k)
	}
	return err
}

// Owned reports whether a [Backend] was the last to program the tables, in any family of the configuration:
// KUBE-SERVICES of table filter leads to KUBE-CLUSTER-IPS, which kube-proxy does not have. If not, chains of the same
// names are kube-proxy's, which [Cleanup] would remove, too. The error is a [*dataplane.UnsupportedError] if a
// program is missing.
func Owned(ctx context.Context, c Config) (owned bool, err error) {
	return anyFamily(ctx, c, (*family).owned)
}

// Foreign reports whether kube-proxy was the last to program the tables, in any family of the configuration: the
// chain KUBE-SERVICES of table nat has rules, and Owned does not hold. Such rules stay in effect when kube-proxy
// ends. The error is a [*dataplane.UnsupportedError] if a program is missing.
func Foreign(ctx context.Context, c Config) (foreign bool, err error) {
	return anyFamily(ctx, c, (*family).foreign)
}

func anyFamily(ctx context.Context, c Config, is func(*family, context.Context) (bool, error)) (any bool, err error) {
	err = c.with(func(c Config, k kernel) error {
		any, err = anyFamilyOf(ctx, c, k, is)
		return err
	})
	return any, err
}

func anyFamilyOf(ctx context.Context, c Config, k kernel, is func(*family, context.Context) (bool, error)) (any bool, err error) {
	err = each(ctx, c, k, func(f *family) error {
		is, err := is(f, ctx)
		any = any || is
		return err
	})
	return any, err
}

func (f *family) owned(ctx context.Context) (bool, error) {
	k, err := f.readKernel(ctx, filter, maphash.MakeSeed())
	return err == nil && k.ours, err
}

func (f *family) foreign(ctx context.Context) (bool, error) {
	k, err := f.readKernel(ctx, filter, maphash.MakeSeed())
	if err != nil || !k.foreign() {
		return false, err
	}
	k, err = f.readKernel(ctx, nat, maphash.MakeSeed())
	return err == nil && k.serves, err
}

func (k *kernelTable) foreign() bool { return k.chains[chainServices] != nil && !k.ours }

// CleanupOwn is like [Cleanup], except that it leaves kube-proxy's rules. In a family whose tables kube-proxy
// programmed last, it removes only the chains and rules that kube-proxy does not have and that kube-proxy's chains do
// not lead to, and leaves the sysctl route_localnet with its guard. Its errors are like those of Cleanup.
func CleanupOwn(ctx context.Context, c Config) error {
	return c.with(func(c Config, k kernel) error { return cleanup(ctx, c, k, (*family).cleanupOwn) })
}

func (f *family) cleanupOwn(ctx context.Context) error {
	k, err := f.readKernel(ctx, filter, maphash.MakeSeed())
	if err != nil {
		return err
	}
	if k.ours {
		return f.cleanup(ctx)
	}
	left := slices.ContainsFunc(k.canary, isCanary)
	for name := range k.chains {
		left = left || extra(filter, name)
	}
	if !left {
		return nil
	}
	for t := range tables {
		if err := f.cleanupExtra(ctx, t); err != nil {
			return err
		}
	}
	return nil
}

// cleanupExtra removes what a Backend has left in a table that kube-proxy programs.
func (f *family) cleanupExtra(ctx context.Context, t table) error {
	k, err := f.readKernel(ctx, t, maphash.MakeSeed())
	if err != nil {
		return err
	}
	guarded := f.guardStays(t, k)
	removed := func(name string) bool { return extra(t, name) && !(guarded && name == chainLocalnet) }
	b := newBatch()
	for name := range k.chains {
		if removed(name) {
			b.drop(t, name)
		}
	}
	if slices.ContainsFunc(k.canary, isCanary) {
		b.put(chain{table: t, name: chainCanary})
	}
	var commands []string
	for _, h := range k.hooks {
		if to := iptext.Target(h.rule); removed(to) && slices.Contains(kernelChains, h.chain) {
			commands = append(commands, iptext.DeleteCommand(h.chain, h.rule))
		}
	}
	out := f.write(ctx, b.inputs(t, commands, f.limit, nil)...)
	if outcomeOf(out.err).result != refused {
		return out.err
	}
	// kube-proxy has not synced all rules yet, and will delete the chains that lead to these itself.
	f.log.Warn("iptables: chains stay because kube-proxy's chains lead to them", slog.String("table", t.String()), slog.Any("error", out.err))
	return nil
}

// extra reports whether a chain is one of a Backend's that kube-proxy never has.
func extra(t table, name string) bool {
	if !owned(t, name) {
		return false
	}
	switch name {
	case chainMarkNotPods, chainRefusedNodePorts, chainClusterIPs, chainLocalnet, chainProbe:
		return true
	}
	if strings.HasPrefix(name, prefixGroup) {
		return true
	}
	return slices.ContainsFunc(dispatchers[:], func(d dispatcher) bool {
		return d.table == t && strings.HasPrefix(name, d.prefix) && name != d.root
	})
}

func (f *family) cleanup(ctx context.Context) error {
	if err := f.stopRefusing(ctx); err != nil {
		return err
	}
	found := false
	// The table filter shows whose the rules are, so it must be the last.
	for _, t := range []table{nat, filter} {
		any, err := f.cleanupTable(ctx, t)
		for f.shrink(outcomeOf(err)) {
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

// stopRefusing deletes the jumps of table filter to the rules that refuse or drop what table nat did not translate.
// IPVS and sockets, which may take over from a Backend, get packets after these rules.
func (f *family) stopRefusing(ctx context.Context) error {
	k, err := f.readKernel(ctx, filter, maphash.MakeSeed())
	if err != nil {
		return err
	}
	var commands []string
	for _, h := range k.hooks {
		if to := iptext.Target(h.rule); slices.Contains(kernelChains, h.chain) && (to == chainServices || to == chainExternalServices) {
			commands = append(commands, iptext.DeleteCommand(h.chain, h.rule))
		}
	}
	return f.write(ctx, newBatch().inputs(filter, commands, f.limit, nil)...).err
}

var kernelChains = []string{"PREROUTING", "INPUT", "FORWARD", "OUTPUT", "POSTROUTING"}

func (f *family) cleanupTable(ctx context.Context, t table) (found bool, err error) {
	k, err := f.readKernel(ctx, t, maphash.MakeSeed())
	if err != nil {
		return false, err
	}
	guarded := f.guardStays(t, k)
	b := newBatch()
	for name := range k.chains {
		if !guarded || name != chainLocalnet {
			b.drop(t, name)
		}
	}
	found = len(b.drops[t]) != 0
	var commands []string
	for _, h := range k.hooks {
		to := iptext.Target(h.rule)
		switch {
		case guarded && to == chainLocalnet:
		case slices.Contains(kernelChains, h.chain):
			commands = append(commands, iptext.DeleteCommand(h.chain, h.rule))
		default:
			stays := "iptables: a chain and its rules stay, because another program's rule leads to it"
			if to == chainMarkMasq || to == chainPostrouting {
				delete(b.drops[t], to)
			} else {
				stays = "iptables: a chain stays, without rules, because another program's rule leads to it"
				b.put(chain{table: t, name: to})
			}
			f.log.Info(stays, slog.String("chain", to), slog.String("table", t.String()), slog.Any("family", f.family), slog.String("rule", "-A "+h.chain+" "+h.rule))
		}
	}
	// A program that uses KUBE-MARK-MASQ needs KUBE-POSTROUTING, too, which the
	// kernel's chain leads to.
	if slices.ContainsFunc(k.hooks, func(h hook) bool {
		return !slices.Contains(kernelChains, h.chain) && strings.HasSuffix(h.rule, iptext.Jump(chainMarkMasq))
	}) {
		delete(b.drops[t], chainPostrouting)
		commands = slices.DeleteFunc(commands, func(c string) bool { return strings.HasSuffix(c, iptext.Jump(chainPostrouting)) })
	}
	return found, f.write(ctx, b.inputs(t, commands, f.limit, nil)...).err
}

// cleanupMangle removes kube-proxy's canary from the table mangle, where kube-proxy has
// nothing else. With iptables-legacy, reading the table creates it.
func (f *family) cleanupMangle(ctx context.Context) error {
	var saved bytes.Buffer
	err := f.Save(ctx, "mangle", &saved)
	found := bytes.Contains(saved.Bytes(), []byte("\n:"+chainCanary+" "))
	if errors.Is(err, iptool.ErrUnreadable) {
		var c iptool.Contents
		c, err = f.ReadContents(ctx, "mangle")
		found = slices.Contains(c.Chains, chainCanary)
	}
	if err != nil || !found {
		return err
	}
	in := &input{}
	in.Begin("mangle")
	in.Remove(chainCanary)
	in.Commit()
	return f.Restore(ctx, in.Bytes())
}
