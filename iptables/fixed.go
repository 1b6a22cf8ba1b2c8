package iptables

import (
	"context"
	"fmt"

	"github.com/go-proxier/proxier/ruleset/dataplane"
)

// checked returns the chains that Check compares: those that are neither a Service's nor an
// endpoint's, and the first chain of each dispatcher.
func (m *model) checked() []chain {
	out := m.fixed()
	for i, t := range m.trees {
		out = append(out, m.dispatcherChain(i, t.first))
	}
	return out
}

// compared returns the rules of checked chains that Check looks for one by one. Rules for Services are only counted:
// iptables-nft takes longer the more rules are ahead.
func (f *family) compared() []hook {
	var out []hook
	add := func(t table, name string, rules []string) {
		for _, r := range rules {
			out = append(out, hook{t, name, r})
		}
	}
	for _, c := range f.model.fixed() {
		add(c.table, c.name, c.rules)
	}
	for i, t := range f.model.trees {
		add(t.table, t.root, f.model.before(i))
		if !f.NFT() || t.first.kids != nil {
			add(t.table, t.root, t.rules(t.first))
		}
		add(t.table, t.root, f.model.after(i))
	}
	return out
}

// afterFull ends a full delta. If it found nothing to write although Check missed a rule, the program cannot find a
// rule that is there, for example because another version of it wrote the rule.
func (f *family) afterFull(wrote bool) {
	if f.missed && !wrote {
		f.jumpsOnly = true
		f.log.Warn("iptables: iptables-restore does not find rules that are in place; alterations of single rules are repaired by the next full sync only")
	}
	f.missed = false
}

// countRules compares the number of rules of each checked chain with the kernel's, with small requests to nf_tables.
// It returns a [*dataplane.DriftError] if one differs, and an error that wraps [nfnl.ErrInterrupted] if another
// process changed a table at the same time.
func (f *family) countRules(ctx context.Context) error {
	for _, c := range f.model.checked() {
		n, err := f.kernel.CountRules(ctx, f.family, c.table, c.name)
		if err != nil {
			return fmt.Errorf("iptables: cannot count the rules of chain %s: %w", c.name, err)
		}
		if n != len(c.rules) {
			f.model = nil
			return &dataplane.DriftError{Backend: "iptables", Family: f.family,
				What: fmt.Sprintf("chain %s of table %s has %d rules, not %d", c.name, c.table, n, len(c.rules))}
		}
	}
	return nil
}
