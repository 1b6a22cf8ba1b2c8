package iptables

import (
	"context"
	"errors"
	"fmt"
	"hash/maphash"
	"log/slog"
	"math/rand/v2"
	"slices"
	"strings"

	"github.com/go-proxier/proxier/internal/iptext"
	"github.com/go-proxier/proxier/ruleset"
)

// replace makes the tables hold the chains of the changes' new Services and no other chains of ours.
func (f *family) replace(ctx context.Context, node *ruleset.Node, changes []ruleset.Change) error {
	f.model = nil
	f.counters = f.can
	f.logIgnored(changes)
	if err := makeCounters(f.accounts, f.counters); err != nil {
		f.notCounted(err)
		f.counters = nil
	}
	f.acceptInvalid = !slices.Contains([]string{"", "0"}, f.kernel.Sysctl(tcpBeLiberal))
	for attempts := 0; ; attempts++ {
		m, err := f.replaceOnce(ctx, node, changes)
		if err == nil {
			f.model = m
			f.dropKept(changes)
			return nil
		}
		if !f.shrink(outcomeOf(err)) && (!restored(err) || attempts == maxRestored) {
			return err
		}
	}
}

// maxRestored is how often one full delta begins again because another program restored a table.
const maxRestored = 3

// replaceOnce makes one attempt at replace. It returns the model of what the tables should hold.
func (f *family) replaceOnce(ctx context.Context, node *ruleset.Node, changes []ruleset.Change) (*model, error) {
	r, err := f.readTables(ctx)
	if err != nil {
		return nil, err
	}
	unset, err := r.guardLoopback(ctx)
	if err != nil {
		return nil, err
	}
	if unset != nil && f.localhost {
		f.log.Error("iptables: NodePorts do not answer at loopback addresses", slog.Any("error", unset))
	}
	m, err := f.full(node, changes, r.need, func() error {
		if r.lines < r.limit {
			return nil
		}
		return r.flush(ctx, [tables][]string{})
	})
	if err != nil {
		return m, err
	}
	if err := r.writeHooks(ctx, m.hooks()); err != nil {
		return m, err
	}
	if err := r.dropStale(ctx); err != nil {
		return m, err
	}
	f.afterFull(r.touched[filter] || r.touched[nat])
	return m, r.adoptCanaries(ctx)
}

// replacement compares the chains that the tables should hold with the kernel's, and writes the difference.
type replacement struct {
	*family
	seed maphash.Seed
	// found holds the chains that the kernel has and need was not called for.
	found [tables]*kernelTable
	// batch holds the chains to write next, and lines is about the number of their lines.
	batch   *batch
	lines   int
	touched [tables]bool
}

func (f *family) readTables(ctx context.Context) (*replacement, error) {
	r := &replacement{family: f, seed: maphash.MakeSeed(), batch: newBatch()}
	for t := range tables {
		var err error
		if r.found[t], err = f.readKernel(ctx, t, r.seed); err != nil {
			return nil, err
		}
		f.canaries[t] = canary{}
		if c := r.found[t].canary; len(c) == 1 && isCanary(c[0]) {
			f.canaries[t].rule = c[0]
		}
	}
	return r, nil
}

// need notes that a chain must exist, and adds it to the batch unless the kernel has it.
func (r *replacement) need(c chain) {
	k := r.found[c.table]
	if !k.has(c, r.seed) {
		r.batch.put(c)
		r.lines += len(c.rules) + 1
		r.touched[c.table] = true
	}
	delete(k.chains, c.name)
}

func (r *replacement) flush(ctx context.Context, commands [tables][]string) error {
	for t := range tables {
		r.touched[t] = r.touched[t] || len(commands[t]) != 0
	}
	out := r.writeBatch(ctx, r.batch, commands)
	r.batch, r.lines = newBatch(), 0
	return out.err
}

func (r *replacement) writeHooks(ctx context.Context, hooks []hook) error {
	// Verdicts on connections that were not forwarded come into effect when all are forwarded: another data plane may
	// still forward them.
	var forward, verdicts [tables][]string
	forward[nat] = hookCommands(nat, hooks, r.found[nat].hooks)
	verdicts[filter] = hookCommands(filter, hooks, r.found[filter].hooks)
	if err := r.flush(ctx, forward); err != nil {
		return err
	}
	return r.flush(ctx, verdicts)
}

func (r *replacement) dropStale(ctx context.Context) error {
	for t := range tables {
		b := newBatch()
		for name := range r.found[t].chains {
			if name != chainCanary {
				b.drop(t, name)
			}
		}
		if len(b.drops[t]) == 0 {
			continue
		}
		r.touched[t] = true
		out := r.writeBatch(ctx, b, [tables][]string{})
		if outcomeOf(out.err).result == refused {
			// Another program's rule leads to one of them.
			r.log.Warn("iptables: cannot delete stale chains, emptying them", slog.Any("error", out.err))
			for name := range b.drops[t] {
				b.put(chain{table: t, name: name})
			}
			out = r.writeBatch(ctx, b, [tables][]string{})
		}
		if out.err != nil {
			return out.err
		}
	}
	return nil
}

// hookCommands returns the commands that turn the hooks that a table has into those that it should have. They delete
// a wanted rule from the kernel's other chains. Other rules that lead to our chains belong to other programs.
func hookCommands(t table, want, have []hook) []string {
	var out []string
	for _, c := range kernelChains {
		of := func(list []hook) (out []string) {
			for _, h := range list {
				if h.table == t && h.chain == c && (h.rule == iptext.Jump(chainLocalnet) || isIPVSFirewall(h) || slices.ContainsFunc(want, h.sameRule)) {
					out = append(out, h.rule)
				}
			}
			return out
		}
		now, then := of(have), of(want)
		slices.Reverse(now) // each was inserted at the beginning
		if slices.Equal(now, then) {
			continue
		}
		for _, rule := range now {
			out = append(out, iptext.DeleteCommand(c, rule))
		}
		for _, rule := range then {
			out = append(out, iptext.InsertCommand(c, rule))
		}
	}
	return out
}

// isIPVSFirewall reports whether a rule is the jump to KUBE-PROXY-FIREWALL of kube-proxy's ipvs mode. Unlike ours, it
// is for every packet.
func isIPVSFirewall(h hook) bool {
	before, ok := strings.CutSuffix(h.rule, `" `+iptext.Jump(chainFirewall))
	return ok && h.table == filter && strings.HasPrefix(before, `-m comment --comment "`) && strings.Count(before, `"`) == 1
}

// canary is the rule of a table's canary, "" if it is not known. Each input changes it to a fresh random value and
// expects the previous one, so that a table that was restored to an earlier state does not look up to date.
type canary struct{ rule string }

func (c *canary) next() string {
	c.rule = iptext.Comment(fmt.Sprintf("%s%016x", canaryText, rand.Uint64()))
	return c.rule
}

// canaryLine is the line of an input that expects the canary's rule, behind the table's name.
const canaryLine = 2

// restored reports whether an input failed because the table does not have the canary's rule.
func restored(err error) bool {
	var e *CommandError
	return errors.As(err, &e) && e.Line == canaryLine && outcomeOf(err).result == refused
}

const canaryText = "kubernetes service rules as of change "

func isCanary(rule string) bool {
	return strings.HasPrefix(rule, strings.TrimSuffix(iptext.Comment(canaryText), `"`))
}

// adoptCanaries makes sure that every table has a canary, and stores its rule.
func (r *replacement) adoptCanaries(ctx context.Context) error {
	for t := range tables {
		if r.touched[t] || r.canaries[t].rule != "" {
			continue
		}
		if out := r.write(ctx, newInput(t, nil, nil, nil, nil, &r.canaries[t])); out.err != nil {
			return out.err
		}
	}
	return nil
}
