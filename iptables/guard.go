//go:build linux

package iptables

import (
	"context"
	"hash/maphash"
	"log/slog"
	"slices"

	"github.com/go-proxier/proxier/tracker"
)

// The sysctl route_localnet, which NodePorts at loopback addresses need, lets neighbors send to
// servers of the node that listen at loopback addresses only (CVE-2020-8558). The guard is the
// chain KUBE-PROXY-LOCALNET and the jumps to it from INPUT and OUTPUT, which drop such packets.
// It is in effect before this package sets the sysctl, and stays for as long as the sysctl is
// set, no matter which program set it.
//
// A rule of the guard without a target, guardMark, records that the sysctl was 0 before. Only
// then does this package set it back, also in another process.

// guardMark is the rule that records that route_localnet was 0 before this package set it.
var guardMark = comment("route_localnet was 0 before")

// guardChain returns the chain of the guard.
func (s *settings) guardChain() chain {
	lo := loopback(s.family)
	c := chain{filter, chainLocalnet, []string{
		join("! "+source(lo), destination(lo), comment("block incoming localnet connections"), "-m conntrack ! --ctstate RELATED,ESTABLISHED,DNAT", "-j DROP"),
	}, rankTop}
	if s.setsBack {
		c.rules = append(c.rules, guardMark)
	}
	return c
}

// guardHooks returns the jumps to the guard.
func guardHooks() []hook {
	return []hook{{filter, "INPUT", jump(chainLocalnet)}, {filter, "OUTPUT", jump(chainLocalnet)}}
}

// guardLoopback writes the guard if NodePorts answer at loopback addresses, and decides
// whether an existing one stays. It sets route_localnet to the value that the NodePorts need.
// unset is the error of setting it, err any other.
func (r *replacement) guardLoopback(ctx context.Context) (unset, err error) {
	if r.family.family != tracker.IPv4 {
		return nil, nil
	}
	k := r.kernel[filter]
	if !r.localhost {
		r.guarded, unset = r.closeLoopback(k)
		r.setsBack = r.guarded && r.setsBack
		return unset, nil
	}
	r.guarded = true
	r.setsBack = r.setsBack || k.setsBack || r.tool.sysctl(routeLocalnet) == "0"
	if err := r.writeGuard(ctx); err != nil {
		return nil, err
	}
	return setSysctl(r.tool.Do, routeLocalnet, "1"), nil
}

// writeGuard writes the guard unless the kernel has it.
func (r *replacement) writeGuard(ctx context.Context) error {
	k, c, b := r.kernel[filter], r.guardChain(), newBatch()
	if h := k.chains[c.name]; h == nil || h.Sum64() != hashChain(r.seed, c.rules) {
		b.put(c)
	}
	var commands []string
	for _, h := range guardHooks() {
		if !slices.Contains(k.hooks, h) {
			commands = append(commands, "-I "+h.chain+" 1 "+h.rule)
			k.hooks = slices.Insert(k.hooks, 0, h)
		}
	}
	if len(b.puts[filter]) == 0 && len(commands) == 0 {
		return nil
	}
	r.missed = false // it is written here
	if _, err := r.write(ctx, b.inputs(filter, commands, r.limit, nil)); err != nil {
		return err
	}
	h := &maphash.Hash{}
	h.SetSeed(r.seed)
	for _, rule := range c.rules {
		h.WriteString(rule)
		h.WriteByte('\n')
	}
	k.chains[c.name] = h
	return nil
}

// dropGuard deletes the guard if the kernel has it.
func (f *family) dropGuard(ctx context.Context, k *kernelTable) error {
	if k.chains[chainLocalnet] == nil {
		return nil
	}
	b := newBatch()
	b.drop(filter, chainLocalnet)
	var commands []string
	for _, h := range k.hooks {
		if h.rule == jump(chainLocalnet) {
			commands = append(commands, "-D "+h.chain+" "+h.rule)
		}
	}
	_, err := f.write(ctx, b.inputs(filter, commands, f.limit, nil))
	return err
}

// guardStays is closeLoopback for a clean-up of a table. An error is logged, and must not keep
// the other rules.
func (f *family) guardStays(t table, k *kernelTable) bool {
	if t != filter || f.family != tracker.IPv4 {
		return false
	}
	stays, _ := f.closeLoopback(k)
	return stays
}

// closeLoopback sets route_localnet back to 0 if a guard records that it was 0 before, unless
// kube-proxy programs the table, which may need it. It reports whether the guard must stay, and
// the error if the sysctl cannot be set.
func (f *family) closeLoopback(k *kernelTable) (stays bool, err error) {
	if k.chains[chainLocalnet] == nil || f.tool.sysctl(routeLocalnet) == "0" {
		return false, nil
	}
	kubeProxy := k.chains[chainServices] != nil && !k.ours()
	if f.setsBack = f.setsBack || k.setsBack; !f.setsBack || kubeProxy {
		return true, nil
	}
	err = setSysctl(f.tool.Do, routeLocalnet, "0")
	if err != nil {
		f.log.Warn("iptables: route_localnet stays, and with it the chain "+chainLocalnet, slog.Any("error", err))
	}
	return err != nil, err
}
