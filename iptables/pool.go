//go:build linux

package iptables

import (
	"slices"
)

// flatPool is how many endpoints are chosen from by one chain, the way operators
// know: a rule each, met one after the other. More are divided by a digit of
// their chains' names, of which there are 32, into groups that have chains of
// their own. The choice stays what it is by one chain, as a group is chosen by its
// weight, and an endpoint more or less changes only the chains on the way to it.
const flatPool = 32

// maxGroupDepth bounds how often groups are divided again. A name has 16 digits.
const maxGroupDepth = 12

// choice is a chain that ends at one endpoint, or a group of them, with what it
// counts for: an endpoint's weight, or the sum of a group's.
type choice struct {
	chain  string
	weight int
}

// choose returns the rules that choose one of the endpoints whose chains and
// weights are given, in that order, and the chains of groups that takes. The pool
// is what the groups' names are made from.
func choose(endpoints []choice, pool string, depth int) (rules []string, groups []chain) {
	if len(endpoints) <= flatPool || depth >= maxGroupDepth {
		return draw(endpoints), nil
	}
	digit := func(ep choice) byte { return ep.chain[len(prefixEndpoint)+depth] }
	sorted := slices.Clone(endpoints)
	slices.SortStableFunc(sorted, func(a, b choice) int { return int(digit(a)) - int(digit(b)) })
	var choices []choice
	for start := 0; start < len(sorted); {
		end := start + 1
		for end < len(sorted) && digit(sorted[end]) == digit(sorted[start]) {
			end++
		}
		part := sorted[start:end]
		start = end
		if len(part) == 1 {
			choices = append(choices, part[0])
			continue
		}
		name := pool + string(digit(part[0]))
		inner, more := choose(part, name, depth+1)
		groups = append(groups, more...)
		c := chain{nat, prefixGroup + hashOf(name), inner, rankGroup + maxGroupDepth - depth}
		groups = append(groups, c)
		choices = append(choices, choice{c.name, total(part)})
	}
	return draw(choices), groups
}

// total returns the sum of the weights.
func total(choices []choice) int {
	sum := 0
	for _, c := range choices {
		sum += c.weight
	}
	return sum
}

// draw returns the rules that choose among choices in proportion to their weights.
// A rule's probability is rounded to a multiple of 2^-31.
func draw(choices []choice) []string {
	left := total(choices)
	rules := make([]string, 0, len(choices))
	for i, c := range choices {
		if i == len(choices)-1 {
			return append(rules, jump(c.chain))
		}
		rules = append(rules, probability(c.weight, left)+" "+jump(c.chain))
		left -= c.weight
	}
	return rules
}
