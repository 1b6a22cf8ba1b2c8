package iptables

import (
	"slices"
	"strconv"

	"github.com/go-proxier/proxier/internal/iptext"
)

// flatPool is the most endpoints that one chain chooses from directly. More endpoints are divided into groups with
// chains of their own, by a digit (one of 32) of their chains' names. A group is chosen by its weight. Adding or
// removing an endpoint changes only the chains on the way to it.
const flatPool = 32

// maxGroupDepth is how often groups are divided by digits. Groups larger than groupPool are then cut into parts: a
// tenant can choose addresses whose chains' names begin alike, and nf_tables allows 15 chains in sequence.
const (
	maxGroupDepth = 2
	groupPool     = 250
)

// choice is the chain of an endpoint or of a group of them, with the endpoint's weight or
// the sum of the group's.
type choice struct {
	chain  string
	weight int
}

// choose returns the rules that choose one of the endpoints, in the given order, and the chains of the groups that
// the rules need. draw returns the rules of one chain. The groups' names are hashes of pool.
func choose(endpoints []choice, pool string, depth int, draw func([]choice) []string) (rules []string, groups []chain) {
	last := depth == maxGroupDepth
	if len(endpoints) <= flatPool || last && len(endpoints) <= groupPool || depth > maxGroupDepth {
		return draw(endpoints), nil
	}
	digit := func(ep choice) byte { return ep.chain[len(prefixEndpoint)+depth] }
	sorted := slices.Clone(endpoints)
	slices.SortStableFunc(sorted, func(a, b choice) int { return int(digit(a)) - int(digit(b)) })
	var choices []choice
	for start := 0; start < len(sorted); {
		end := start + 1
		for end < len(sorted) && (last && end-start < groupPool || !last && digit(sorted[end]) == digit(sorted[start])) {
			end++
		}
		part := sorted[start:end]
		name := pool + string(digit(part[0]))
		if last {
			name = pool + "#" + strconv.Itoa(start)
		}
		start = end
		if len(part) == 1 {
			choices = append(choices, part[0])
			continue
		}
		inner, more := choose(part, name, depth+1, draw)
		groups = append(groups, more...)
		c := chain{nat, prefixGroup + hashOf(name), inner, rankGroup + maxGroupDepth - depth}
		groups = append(groups, c)
		choices = append(choices, choice{c.name, total(part)})
	}
	return draw(choices), groups
}

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
			return append(rules, iptext.Jump(c.chain))
		}
		rules = append(rules, probability(c.weight, left)+" "+iptext.Jump(c.chain))
		left -= c.weight
	}
	return rules
}
