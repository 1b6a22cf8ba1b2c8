//go:build linux

package iptables

import (
	"context"
	"errors"
	"fmt"

	"golang.org/x/sys/unix"

	"github.com/go-proxier/proxier/internal/nfnl"
	"github.com/go-proxier/proxier/ruleset"
	"github.com/go-proxier/proxier/tracker"
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

// compared returns the rules of checked chains that Check looks for one by one. With
// iptables-nft, the time to find a rule grows with the rules ahead of it, so the rules for
// Services are only counted.
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
		if !f.tool.NFT() || t.first.kids != nil {
			add(t.table, t.root, t.rules(t.first))
		}
		add(t.table, t.root, f.model.after(i))
	}
	return out
}

// afterFull ends a full delta, which wrote the tables if wrote is set. If it found nothing to
// write although Check missed a rule, the program cannot find a rule that is there, for
// example because another version of it wrote the rule. Check would miss it for ever.
func (f *family) afterFull(wrote bool) {
	if f.missed && !wrote {
		f.jumpsOnly = true
		f.log.Warn("iptables: iptables-restore does not find rules that are in place; alterations of single rules are repaired by the next full sync only")
	}
	f.missed = false
}

// countRules compares the number of rules of each checked chain with the kernel's, with
// small requests to nf_tables. It returns a [*ruleset.DriftError] if one differs. The error
// wraps [nfnl.ErrInterrupted] if another process changed a table at the same time.
func (f *family) countRules(ctx context.Context, conn *nfnl.Conn) error {
	for _, c := range f.model.checked() {
		n, err := kernelRules(ctx, conn, f.family, c)
		if err != nil {
			return fmt.Errorf("iptables: cannot count the rules of chain %s: %w", c.name, err)
		}
		if n != len(c.rules) {
			f.model = nil
			return &ruleset.DriftError{Backend: "iptables", Family: f.family,
				What: fmt.Sprintf("chain %s of table %s has %d rules, not %d", c.name, c.table, n, len(c.rules))}
		}
	}
	return nil
}

// kernelRules returns the number of rules of a chain in nf_tables, 0 if it does not exist.
func kernelRules(ctx context.Context, conn *nfnl.Conn, fam tracker.Family, c chain) (n int, err error) {
	proto := uint8(unix.NFPROTO_IPV4)
	if fam == tracker.IPv6 {
		proto = unix.NFPROTO_IPV6
	}
	attrs := nfnl.AppendString(nil, unix.NFTA_RULE_TABLE, c.table.String())
	attrs = nfnl.AppendString(attrs, unix.NFTA_RULE_CHAIN, c.name)
	r := nfnl.Request{Subsystem: unix.NFNL_SUBSYS_NFTABLES, Type: unix.NFT_MSG_GETRULE, Family: proto, Dump: true, Attrs: attrs}
	err = conn.Get(ctx, r, func(attrs []byte) error {
		var table, name string
		for typ, data := range nfnl.Attributes(attrs) {
			switch typ {
			case unix.NFTA_RULE_TABLE:
				table = nfnl.String(data)
			case unix.NFTA_RULE_CHAIN:
				name = nfnl.String(data)
			}
		}
		// Old kernels report the rules of all chains.
		if table == c.table.String() && name == c.name {
			n++
		}
		return nil
	})
	if errors.Is(err, unix.ENOENT) {
		return 0, nil
	}
	return n, err
}
