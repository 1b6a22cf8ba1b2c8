//go:build linux

package main

import (
	"fmt"
	"regexp"
	"strings"
)

// iptablesFaults damage the rules of mode iptables.
var iptablesFaults = []fault{
	{"flush nat", func(w *world) (string, error) { return w.shell(w.iptables() + " -t nat -F"), nil }},
	{"flush filter", func(w *world) (string, error) { return w.shell(w.iptables() + " -F"), nil }},
	{"flush both", func(w *world) (string, error) {
		t := w.iptables()
		return w.shell(t + " -t nat -F; " + t + " -F"), nil
	}},
	{"restore an old state", func(w *world) (string, error) {
		w.restored = true
		t := w.iptables()
		return w.shell(fmt.Sprintf("s=$(%[1]s-save); sleep 0.1; printf '%%s\\n' \"$s\" | %[1]s-restore", t)), nil
	}},
	{"foreign rule", func(w *world) (string, error) {
		t := w.iptables()
		return w.shell(t + " -I FORWARD -j ACCEPT; " + t + " -D FORWARD -j ACCEPT"), nil
	}},
	{"delete rule", deleteFixedRule},
}

func (w *world) iptables() string { return pick(w.rng, "iptables", "ip6tables") }

// fixedRule matches the rules of the chains that exist without any Service.
var fixedRule = regexp.MustCompile(`(?m)^-A (KUBE-POSTROUTING|KUBE-MARK-MASQ|KUBE-FORWARD|KUBE-SERVICES|KUBE-NODEPORTS|PREROUTING|OUTPUT|POSTROUTING|INPUT|FORWARD) .*$`)

// deleteFixedRule deletes one rule of a fixed chain.
func deleteFixedRule(w *world) (string, error) {
	tool, table := w.iptables(), pick(w.rng, "nat", "filter")
	text, err := w.node.Output(tool+"-save", "-t", table)
	if err != nil {
		return "", err
	}
	list := fixedRule.FindAllString(text, -1)
	if len(list) == 0 {
		return "no rule", nil
	}
	rule := "-D" + strings.TrimPrefix(pick(w.rng, list...), "-A")
	return w.shell(tool + " -t " + table + " " + rule), nil
}
