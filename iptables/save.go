package iptables

import (
	"context"
	"hash/maphash"
	"io"

	"github.com/go-proxier/proxier/internal/iptext"
)

// kernelTable holds the kernel's state of one table.
type kernelTable struct {
	// chains holds a hash of the rules of each of our chains.
	chains map[string]*maphash.Hash
	// hooks is the rules in other chains that lead to ours, in order.
	hooks []hook
	// canary is the rules of our canary.
	canary []string
	// ours reports, of the table filter, that a Backend was the last to program it: KUBE-SERVICES
	// leads to KUBE-CLUSTER-IPS.
	ours bool
	// setsBack reports that the guard of the loopback range has guardMark.
	setsBack bool
}

// hashChain returns the hash of a chain's rules.
func hashChain(seed maphash.Seed, rules []string) (h maphash.Hash) {
	h.SetSeed(seed)
	for _, r := range rules {
		h.WriteString(r)
		h.WriteByte('\n')
	}
	return h
}

// has reports whether the table has a chain of ours with these rules.
func (k *kernelTable) has(c chain, seed maphash.Seed) bool {
	h := k.chains[c.name]
	if h == nil {
		return false
	}
	want := hashChain(seed, c.rules)
	return h.Sum64() == want.Sum64()
}

// readKernel reads a table.
func readKernel(ctx context.Context, p programs, tab table, seed maphash.Seed) (*kernelTable, error) {
	r, w := io.Pipe()
	done := make(chan *kernelTable, 1)
	go func() {
		k := parseSave(r, tab, seed)
		// The program must be able to write the rest, even if the parser gave up.
		_, _ = io.Copy(io.Discard, r)
		done <- k
	}()
	err := p.Save(ctx, tab.String(), w)
	w.Close()
	return <-done, err
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
			k.ours = k.ours || string(l.Rule) == iptext.Jump(chainClusterIPs)
		case chainLocalnet:
			k.setsBack = k.setsBack || string(l.Rule) == guardMark
		}
	})
	return k
}
