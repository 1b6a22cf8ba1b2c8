package iptables

import (
	"cmp"
	"maps"
	"slices"
	"strings"

	"github.com/go-proxier/proxier/internal/iptext"
)

type batch struct {
	puts  [tables]map[string]chain
	drops [tables]map[string]bool
}

func newBatch() *batch {
	b := &batch{}
	for t := range tables {
		b.puts[t], b.drops[t] = map[string]chain{}, map[string]bool{}
	}
	return b
}

func (b *batch) put(c chain) {
	delete(b.drops[c.table], c.name)
	b.puts[c.table][c.name] = c
}

func (b *batch) drop(t table, name string) {
	delete(b.puts[t], name)
	b.drops[t][name] = true
}

// sorted returns the chains to write, each after the chains that it leads to.
func (b *batch) sorted(t table) []chain {
	return slices.SortedFunc(maps.Values(b.puts[t]), func(a, b chain) int { return cmp.Or(a.rank-b.rank, strings.Compare(a.name, b.name)) })
}

func (b *batch) dropped(t table) []string { return slices.Sorted(maps.Keys(b.drops[t])) }

func (b *batch) empty() bool {
	for t := range tables {
		if len(b.puts[t])+len(b.drops[t]) != 0 {
			return false
		}
	}
	return true
}

// difference adds the changes from one set of chains to another.
func (b *batch) difference(before, now []chain) {
	type id struct {
		t    table
		name string
	}
	old := make(map[id][]string, len(before))
	for _, c := range before {
		old[id{c.table, c.name}] = c.rules
	}
	for _, c := range now {
		k := id{c.table, c.name}
		rules, was := old[k]
		delete(old, k)
		if !was || !slices.Equal(rules, c.rules) {
			b.put(c)
		}
	}
	for k := range old {
		b.drop(k.t, k.name)
	}
}

// input is the input of one call of iptables-restore about one table, which applies it as a
// whole or not at all.
type input struct {
	iptext.Input
	table table
	// rules is how many rules it writes, not counting the canary's.
	rules int
}

// inputs returns the inputs for one table, of about limit lines each. They write each chain before the chains that
// lead to it, then run the commands, then delete chains. Unless canary is nil, each input changes it.
func (b *batch) inputs(t table, commands []string, limit int, canary *canary) []*input {
	puts, drops := b.sorted(t), b.dropped(t)
	var out []*input
	lines, start := 0, 0
	for i, c := range puts {
		if lines += len(c.rules) + 1; lines > limit && i > start {
			out = append(out, newInput(t, puts[start:i], nil, nil, nil, canary))
			lines, start = len(c.rules)+1, i
		}
	}
	puts = puts[start:]
	if lines+len(drops) <= limit {
		if len(puts)+len(commands)+len(drops) != 0 {
			out = append(out, newInput(t, puts, commands, drops, drops, canary))
		}
		return out
	}
	if len(puts)+len(commands) != 0 {
		out = append(out, newInput(t, puts, commands, nil, nil, canary))
	}
	// Stale chains may lead to each other, so all are emptied before the first is
	// deleted.
	for part := range slices.Chunk(drops, limit) {
		out = append(out, newInput(t, nil, nil, part, nil, canary))
	}
	for part := range slices.Chunk(drops, limit) {
		out = append(out, newInput(t, nil, nil, nil, part, canary))
	}
	return out
}

// newInput returns an input that writes puts and runs commands. It empties the chains in
// flush and deletes those in drop. It fails unless the table has the canary's rule.
func newInput(t table, puts []chain, commands, flush, drop []string, canary *canary) *input {
	in := &input{table: t}
	in.Begin(t.String())
	if canary != nil && canary.rule != "" {
		in.Expect(chainCanary, canary.rule)
	}
	for _, c := range puts {
		in.rules += len(c.rules)
	}
	if canary != nil {
		puts = append(slices.Clip(puts), chain{t, chainCanary, []string{canary.next()}, rankCanary})
	}
	for _, c := range puts {
		in.Chain(c.name)
	}
	for _, name := range flush {
		in.Chain(name)
	}
	for _, c := range puts {
		for _, r := range c.rules {
			in.Append(c.name, r)
		}
	}
	for _, c := range commands {
		in.Command(c)
	}
	for _, name := range drop {
		in.Remove(name)
	}
	in.Commit()
	return in
}
