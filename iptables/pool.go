//go:build linux

package iptables

import (
	"slices"
)

// flatPool is how many endpoints are chosen from by one chain, the way operators
// know: a rule each, met one after the other. More are divided by a digit of
// their chains' names, of which there are 32, into groups that have chains of
// their own. The choice stays uniform, as a group is chosen by its size, and an
// endpoint more or less changes only the chains on the way to it.
const flatPool = 32

// maxGroupDepth bounds how often groups are divided again. A name has 16 digits.
const maxGroupDepth = 12

// choice is a chain that ends at one endpoint, or a group of them.
type choice struct {
	chain string
	size  int
}

// choose returns the rules that choose one of the endpoints whose chains are
// given, in that order, and the chains of groups that takes. The pool is what the
// groups' names are made from.
func choose(endpoints []string, pool string, depth int) (rules []string, groups []chain) {
	if len(endpoints) <= flatPool || depth >= maxGroupDepth {
		choices := make([]choice, len(endpoints))
		for i, ep := range endpoints {
			choices[i] = choice{ep, 1}
		}
		return draw(choices), nil
	}
	digit := func(ep string) byte { return ep[len(prefixEndpoint)+depth] }
	sorted := slices.Clone(endpoints)
	slices.SortStableFunc(sorted, func(a, b string) int { return int(digit(a)) - int(digit(b)) })
	var choices []choice
	for start := 0; start < len(sorted); {
		end := start + 1
		for end < len(sorted) && digit(sorted[end]) == digit(sorted[start]) {
			end++
		}
		part := sorted[start:end]
		start = end
		if len(part) == 1 {
			choices = append(choices, choice{part[0], 1})
			continue
		}
		name := pool + string(digit(part[0]))
		inner, more := choose(part, name, depth+1)
		groups = append(groups, more...)
		c := chain{nat, prefixGroup + hashOf(name), inner, rankGroup + maxGroupDepth - depth}
		groups = append(groups, c)
		choices = append(choices, choice{c.name, len(part)})
	}
	return draw(choices), groups
}

// draw returns the rules that choose among choices in proportion to their sizes.
func draw(choices []choice) []string {
	left := 0
	for _, c := range choices {
		left += c.size
	}
	rules := make([]string, 0, len(choices))
	for _, c := range choices {
		if c.size == left {
			return append(rules, jump(c.chain))
		}
		rules = append(rules, probability(c.size, left)+" "+jump(c.chain))
		left -= c.size
	}
	return rules
}
