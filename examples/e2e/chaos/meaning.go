//go:build linux

package main

import (
	"fmt"
	"maps"
	"regexp"
	"slices"
	"strings"
)

// meaning is the state of a kernel: facts by their names, without names and numbers that an
// agent chooses.
type meaning map[string]string

// withoutUnused returns m without facts about chains that no rule leads to.
func (m meaning) withoutUnused() meaning {
	out := maps.Clone(m)
	maps.DeleteFunc(out, func(name, _ string) bool { return strings.HasPrefix(name, unused) })
	return out
}

// differences returns the facts that differ from those of a new agent.
func (got meaning) differences(want meaning) (out []string) {
	both := maps.Clone(want)
	maps.Copy(both, got)
	for _, name := range slices.Sorted(maps.Keys(both)) {
		g, inGot := got[name]
		w, inWant := want[name]
		switch {
		case !inWant && strings.HasSuffix(g, drains):
		case !inWant:
			out = append(out, fmt.Sprintf("too much: %s = %s", name, g))
		case !inGot:
			out = append(out, fmt.Sprintf("missing:  %s = %s", name, w))
		case strings.TrimSuffix(g, drains) != w:
			out = append(out, fmt.Sprintf("differs:  %s\n    is        %s\n    should be %s", name, g, w))
		}
	}
	return out
}

// drains ends the values of facts that a new agent may lack, because open connections keep them.
const drains = " (drains)"

// unused begins the names of facts about chains that no rule leads to.
const unused = "unused "

// counters matches what the tools print about traffic.
var counters = regexp.MustCompile(`\[\d+:\d+\]`)

// addRules adds the chains and rules that iptables-save and ip6tables-save list. The order of a
// chain's rules counts.
func (m meaning) addRules(n *node) error {
	for _, tool := range []string{"iptables-save", "ip6tables-save"} {
		text, err := n.sh(tool)
		if err != nil {
			return err
		}
		for table, chains := range parseSave(text) {
			reached := reachable(builtIn, chains)
			for chain, rules := range chains {
				name := tool + " " + table + " " + chain
				if len(rules) == 0 && slices.Contains(builtIn, chain) {
					continue // iptables-legacy creates a table when a program looks for it
				}
				if !reached[chain] {
					name = unused + name
				}
				m[name] = fmt.Sprintf("%d rules", len(rules))
				for i, rule := range rules {
					m[fmt.Sprintf("%s %03d", name, i+1)] = rule
				}
			}
		}
	}
	return nil
}

// parseSave returns the rules that iptables-save lists, by table and chain.
func parseSave(text string) map[string]map[string][]string {
	out, table := map[string]map[string][]string{}, ""
	for line := range strings.Lines(text) {
		line = counters.ReplaceAllString(strings.TrimSpace(line), "")
		f := strings.Fields(line)
		switch {
		case line == "" || strings.Contains(line, "-CANARY"): // a canary has a new comment each time
		case strings.Contains(line, `"route_localnet was 0 before"`):
			// A record without a target, which an agent that starts after a flush cannot restore.
		case line[0] == '*':
			table = line[1:]
			out[table] = map[string][]string{}
		case line[0] == ':':
			out[table][f[0][1:]] = nil
		case f[0] == "-A":
			out[table][f[1]] = append(out[table][f[1]], sharedComment.ReplaceAllString(line, ""))
		}
	}
	return out
}

// builtIn holds the chains that the kernel calls.
var builtIn = []string{"PREROUTING", "INPUT", "FORWARD", "OUTPUT", "POSTROUTING"}

var jump = regexp.MustCompile(`(?:-[jg]|goto|jump) ([\w-]+)`)

// reachable returns some chains and those that their rules lead to.
func reachable(from []string, chains map[string][]string) map[string]bool {
	reached := map[string]bool{}
	for next := slices.Clone(from); len(next) != 0; next = next[1:] {
		if reached[next[0]] {
			continue
		}
		reached[next[0]] = true
		for _, rule := range chains[next[0]] {
			for _, to := range jump.FindAllStringSubmatch(rule, -1) {
				next = append(next, to[1])
			}
		}
	}
	return reached
}

// sharedComment matches the comments of rules that several Services share. It names one of them.
var sharedComment = regexp.MustCompile(` -m comment --comment "[^"]*health check node port"`)

func iptablesMeaning(n *node, _ environment) (meaning, error) {
	m := meaning{}
	return m, m.addRules(n)
}
