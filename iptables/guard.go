package iptables

import (
	"context"
	"log/slog"
	"slices"

	"github.com/go-proxier/proxier/internal/iptext"
	"github.com/go-proxier/proxier/tracker"
)

// guardLoopback writes the guard if NodePorts answer at loopback addresses, and decides whether an existing one
// stays. It sets route_localnet to what the NodePorts need. unset is the error of setting it, err any other.
func (r *replacement) guardLoopback(ctx context.Context) (unset, err error) {
	if r.family.family != tracker.IPv4 {
		return nil, nil
	}
	k := r.found[filter]
	if !r.localhost {
		r.guarded, unset = r.closeLoopback(k)
		r.setsBack = r.guarded && r.setsBack
		return unset, nil
	}
	r.guarded = true
	r.setsBack = r.setsBack || k.setsBack || r.kernel.Sysctl(routeLocalnet) == "0"
	if err := r.writeGuard(ctx); err != nil {
		return nil, err
	}
	return setSysctl(r.kernel, routeLocalnet, "1"), nil
}

func (r *replacement) writeGuard(ctx context.Context) error {
	k, c, b := r.found[filter], r.guardChain(), newBatch()
	if !k.has(c, r.seed) {
		b.put(c)
	}
	var commands []string
	for _, h := range guardHooks() {
		if !slices.Contains(k.hooks, h) {
			commands = append(commands, iptext.InsertCommand(h.chain, h.rule))
			k.hooks = slices.Insert(k.hooks, 0, h)
		}
	}
	if len(b.puts[filter]) == 0 && len(commands) == 0 {
		return nil
	}
	r.missed = false // it is written here
	if out := r.write(ctx, b.inputs(filter, commands, r.limit, nil)...); out.err != nil {
		return out.err
	}
	h := hashChain(r.seed, c.rules)
	k.chains[c.name] = &h
	return nil
}

func (f *family) dropGuard(ctx context.Context, k *kernelTable) error {
	if k.chains[chainLocalnet] == nil {
		return nil
	}
	b := newBatch()
	b.drop(filter, chainLocalnet)
	var commands []string
	for _, h := range k.hooks {
		if h.rule == iptext.Jump(chainLocalnet) {
			commands = append(commands, iptext.DeleteCommand(h.chain, h.rule))
		}
	}
	return f.write(ctx, b.inputs(filter, commands, f.limit, nil)...).err
}

// guardStays is closeLoopback for a clean-up of a table. It logs an error.
func (f *family) guardStays(t table, k *kernelTable) bool {
	if t != filter || f.family != tracker.IPv4 {
		return false
	}
	stays, _ := f.closeLoopback(k)
	return stays
}

// closeLoopback sets route_localnet back to 0 if a guard records that it was 0 before, unless kube-proxy programs the
// table. It reports whether the guard must stay, and the error if the sysctl cannot be set.
func (f *family) closeLoopback(k *kernelTable) (stays bool, err error) {
	if k.chains[chainLocalnet] == nil || f.kernel.Sysctl(routeLocalnet) == "0" {
		return false, nil
	}
	if f.setsBack = f.setsBack || k.setsBack; !f.setsBack || k.foreign() {
		return true, nil
	}
	err = setSysctl(f.kernel, routeLocalnet, "0")
	if err != nil {
		f.log.Warn("iptables: route_localnet stays, and with it the chain "+chainLocalnet, slog.Any("error", err))
	}
	return err != nil, err
}
