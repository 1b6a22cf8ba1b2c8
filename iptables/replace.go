//go:build linux

package iptables

import (
	"context"
	"errors"
	"hash/maphash"
	"log/slog"
	"slices"
	"strings"

	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/tracker"
)

// replace makes the tables hold what the changes' new Services come to and
// nothing else of ours, whatever they hold now. It returns the Services that were
// refused.
func (f *family) replace(ctx context.Context, node *ruleset.Node, changes []ruleset.Change) (map[tracker.Key]error, error) {
	f.model = nil
	f.counters = f.can
	if err := makeCounters(f.accounts, f.counters); err != nil {
		f.notCounted(err)
		f.counters = counters{}
	}
	f.acceptInvalid = !slices.Contains([]string{"", "0"}, f.tool.sysctl(tcpBeLiberal))
	if f.localhost {
		if err := setSysctl(f.tool.Do, routeLocalnet, "1"); err != nil {
			f.log.Error("iptables: NodePorts do not answer at loopback addresses", slog.Any("error", err))
		}
	}
	failed := map[tracker.Key]error{}
	for {
		m, bad, err := f.replaceOnce(ctx, node, changes)
		switch {
		case err == nil && len(bad) == 0:
			f.model = m
			return failed, nil
		case err == nil:
		case f.smaller(err):
			continue
		case !refused(err) && !tooLarge(err):
			return nil, err
		default:
			empty, blame := newModel(f.settings, node)
			if blame == nil {
				bad, blame = f.blame(ctx, empty, changes)
			}
			if blame != nil || len(bad) == 0 {
				return nil, errors.Join(err, blame)
			}
		}
		changes = f.fallBack(changes, bad, failed)
	}
}

// fallBack adds the Services that are bad to those that failed. In what is to be
// attempted next they are what they were when they were last accepted, or left
// out. They come first, so that others take from them what is theirs by now.
func (f *family) fallBack(changes []ruleset.Change, bad, failed map[tracker.Key]error) []ruleset.Change {
	var kept, rest []ruleset.Change
	for _, c := range changes {
		err := bad[c.Key]
		if err == nil {
			rest = append(rest, c)
			continue
		}
		if failed[c.Key] == nil {
			f.fail(failed, c.Key, err)
		}
		if c.Old != nil && c.Old != c.New {
			c.New = c.Old
			kept = append(kept, c)
		}
	}
	return append(kept, rest...)
}

// replaceOnce is one attempt at it. Services that cannot be rendered are bad; it
// has to be attempted again without them.
func (f *family) replaceOnce(ctx context.Context, node *ruleset.Node, changes []ruleset.Change) (_ *model, bad map[tracker.Key]error, _ error) {
	m, err := newModel(f.settings, node)
	if err != nil {
		return nil, nil, err
	}
	seed := maphash.MakeSeed()
	var kernel [tables]*kernelTable
	for t := range tables {
		if kernel[t], err = f.tool.readKernel(ctx, t, seed); err != nil {
			return nil, nil, err
		}
	}

	b, lines := newBatch(), 0
	var touched [tables]bool
	// need notes a chain that there must be, and writes it unless it is there.
	need := func(c chain) {
		k := kernel[c.table]
		hash, is := k.chains[c.name]
		delete(k.chains, c.name)
		if !is || hash != hashChain(seed, c.rules) {
			b.put(c)
			lines += len(c.rules) + 1
			touched[c.table] = true
		}
	}
	flush := func(commands [tables][]string) error {
		for t := range tables {
			touched[t] = touched[t] || len(commands[t]) != 0
		}
		_, err := f.writeBatch(ctx, b, commands)
		b, lines = newBatch(), 0
		return err
	}

	// What Services have of their own comes before what leads to it.
	for _, c := range m.fixed() {
		if c.rank == rankMark {
			need(c)
		}
	}
	for _, c := range changes {
		if c.New == nil {
			continue
		}
		if err := m.set(c.ID(), c.New, func(_, now []chain) {
			for _, c := range now {
				need(c)
			}
		}); err != nil {
			if bad == nil {
				bad = map[tracker.Key]error{}
			}
			bad[c.Key] = err
		}
		if lines >= f.limit {
			if err := flush([tables][]string{}); err != nil {
				return nil, nil, err
			}
		}
	}
	if len(bad) != 0 {
		return nil, bad, nil
	}

	m.allChains(func(c chain) {
		if c.rank != rankMark {
			need(c)
		}
	})
	var commands [tables][]string
	for t := range tables {
		commands[t] = hookCommands(t, m.hooks(), kernel[t].hooks)
	}
	// Verdicts on what was not forwarded come into effect when all is forwarded, and
	// not before: until then another data plane may have it arrive there.
	verdicts := commands
	verdicts[nat], commands[filter] = nil, nil
	for _, c := range [][tables][]string{commands, verdicts} {
		if err := flush(c); err != nil {
			return nil, nil, err
		}
	}
	for _, t := range m.trees {
		clear(t.changed)
	}
	if err := f.dropStale(ctx, kernel, &touched); err != nil {
		return nil, nil, err
	}
	return m, nil, f.adoptCanaries(ctx, kernel, touched)
}

// hookCommands returns the commands after which the hooks of a table are as they
// should be, if they are not. A rule that is wanted in one of the kernel's chains is
// deleted from the others, where an earlier version may have put it. Rules that lead to
// our chains otherwise are somebody else's.
func hookCommands(t table, want, have []hook) []string {
	var out []string
	for _, c := range kernelChains {
		of := func(list []hook) (out []string) {
			for _, h := range list {
				if h.table == t && h.chain == c && (h.rule == jump(chainLocalnet) || isIPVSFirewall(h) || slices.ContainsFunc(want, h.sameRule)) {
					out = append(out, h.rule)
				}
			}
			return out
		}
		now, then := of(have), of(want)
		slices.Reverse(now) // each was put before the others
		if slices.Equal(now, then) {
			continue
		}
		for _, rule := range now {
			out = append(out, "-D "+c+" "+rule)
		}
		for _, rule := range then {
			out = append(out, "-I "+c+" 1 "+rule)
		}
	}
	return out
}

// isIPVSFirewall reports whether a rule is the jump to KUBE-PROXY-FIREWALL of
// kube-proxy's ipvs mode, by its name the same chain: unlike ours, it is for every
// packet.
func isIPVSFirewall(h hook) bool {
	before, ok := strings.CutSuffix(h.rule, `" `+jump(chainFirewall))
	return ok && h.table == filter && strings.HasPrefix(before, `-m comment --comment "`) && strings.Count(before, `"`) == 1
}

// dropStale deletes the chains of ours that are left over.
func (f *family) dropStale(ctx context.Context, kernel [tables]*kernelTable, touched *[tables]bool) error {
	for t := range tables {
		b := newBatch()
		for name := range kernel[t].chains {
			if name != chainCanary {
				b.drop(t, name)
			}
		}
		if len(b.drops[t]) == 0 {
			continue
		}
		touched[t] = true
		var mark canaryMark
		wrote, err := f.write(ctx, b.inputs(t, nil, f.limit, mark.rule))
		if refused(err) {
			// Somebody else's rules lead to one of them: they stay, without rules.
			f.log.Warn("iptables: stale chains are not deleted, only emptied", slog.Any("error", err))
			for name := range b.drops[t] {
				b.put(chain{table: t, name: name})
			}
			wrote, err = f.write(ctx, b.inputs(t, nil, f.limit, mark.rule))
		}
		if err != nil {
			return err
		}
		if wrote {
			f.canary[t] = mark.last
		}
	}
	return nil
}

// adoptCanaries makes sure that every table has a canary that is known here.
func (f *family) adoptCanaries(ctx context.Context, kernel [tables]*kernelTable, touched [tables]bool) error {
	for t := range tables {
		if touched[t] {
			continue
		}
		if c := kernel[t].canary; len(c) == 1 && isCanary(c[0]) {
			f.canary[t] = c[0]
			continue
		}
		var mark canaryMark
		if _, err := f.write(ctx, []*input{newInput(t, nil, nil, nil, nil, mark.rule)}); err != nil {
			return err
		}
		f.canary[t] = mark.last
	}
	return nil
}
