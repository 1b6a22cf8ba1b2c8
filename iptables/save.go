package iptables

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"hash/maphash"
	"io"
	"log/slog"
	"strings"

	"github.com/go-proxier/proxier/internal/iptext"
	"github.com/go-proxier/proxier/internal/iptool"
)

// kernelTable holds the kernel's state of one table.
type kernelTable struct {
	// chains holds a hash of the rules of each of our chains.
	chains map[string]*maphash.Hash
	// hooks is the rules in other chains that lead to ours, in order.
	hooks  []hook
	canary []string
	// ours reports, of the table filter, that a Backend was the last to program it.
	ours bool
	// serves reports that KUBE-SERVICES has rules.
	serves bool
	// setsBack reports that the guard of the loopback range has guardMark.
	setsBack bool
	// unknown means that the rules of chains are not known.
	unknown bool
}

func hashChain(seed maphash.Seed, rules []string) (h maphash.Hash) {
	h.SetSeed(seed)
	for _, r := range rules {
		h.WriteString(r)
		h.WriteByte('\n')
	}
	return h
}

func (k *kernelTable) has(c chain, seed maphash.Seed) bool {
	h := k.chains[c.name]
	if h == nil || k.unknown {
		return false
	}
	want := hashChain(seed, c.rules)
	return h.Sum64() == want.Sum64()
}

// readKernel reads a table. If iptables-save cannot print it, the rules of chains are unknown.
func (f *family) readKernel(ctx context.Context, tab table, seed maphash.Seed) (*kernelTable, error) {
	r, w := io.Pipe()
	done := make(chan *kernelTable, 1)
	go func() {
		k := parseSave(r, tab, seed)
		// The program must be able to write the rest, even if the parser gave up.
		_, _ = io.Copy(io.Discard, r)
		done <- k
	}()
	err := f.Save(ctx, tab.String(), w)
	w.Close()
	k := <-done
	if !errors.Is(err, iptool.ErrUnreadable) {
		f.unreadable[tab] = ""
		return k, err
	}
	c, err := f.ReadContents(ctx, tab.String())
	if err != nil {
		return nil, err
	}
	if reason := c.Unreadable().Error(); f.unreadable[tab] != reason {
		f.unreadable[tab] = reason
		f.log.Warn("iptables: cannot read a table in which another program has rules: traffic is not counted, and each full sync writes all chains again; keep such rules in a table of their own",
			slog.String("table", tab.String()), slog.String("reason", reason))
	}
	known := []string{chainLocalnet + " " + guardMark}
	for _, h := range append((&model{settings: &settings{guarded: true}}).hooks(), guardHooks()...) {
		if h.table == tab {
			known = append(known, h.chain+" "+h.rule)
		}
	}
	text := c.Text(tab.String(), known, func(in []byte) error { return f.Restore(ctx, in) })
	k = parseSave(strings.NewReader(text), tab, seed)
	k.unknown = true
	return k, nil
}

// saved returns the output of iptables-save about a table. The error names a chain that iptables-save cannot print.
func (f *family) saved(ctx context.Context, tab table, options ...string) (string, error) {
	var out strings.Builder
	err := f.Save(ctx, tab.String(), &out, options...)
	if errors.Is(err, iptool.ErrUnreadable) {
		c, failed := f.ReadContents(ctx, tab.String())
		err = cmp.Or(failed, c.Unreadable())
	}
	if err != nil {
		return "", fmt.Errorf("iptables: cannot read table %v: %w", tab, err)
	}
	return out.String(), nil
}

// parseSave reads the output of iptables-save about a table. It ignores unknown lines.
func parseSave(r io.Reader, tab table, seed maphash.Seed) *kernelTable {
	k := &kernelTable{chains: map[string]*maphash.Hash{}}
	var last string
	var lastHash *maphash.Hash
	iptext.Scan(r, func(l iptext.Line) {
		if l.Table != tab.String() {
			return
		}
		if string(l.Chain) != last {
			last = string(l.Chain)
			lastHash = k.chains[last]
		}
		if !l.IsRule {
			if owned(tab, last) {
				h := hashChain(seed, nil)
				lastHash = &h
				k.chains[last] = lastHash
			}
			return
		}
		if lastHash == nil {
			if to := iptext.Target(l.Rule); to != "" && owned(tab, to) {
				k.hooks = append(k.hooks, hook{tab, last, string(l.Rule)})
			}
			return
		}
		lastHash.Write(l.Rule)
		lastHash.WriteByte('\n')
		switch last {
		case chainCanary:
			k.canary = append(k.canary, string(l.Rule))
		case chainServices:
			k.serves = true
			k.ours = k.ours || string(l.Rule) == iptext.Jump(chainClusterIPs)
		case chainLocalnet:
			k.setsBack = k.setsBack || string(l.Rule) == guardMark
		}
	})
	return k
}
